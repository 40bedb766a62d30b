"""a(t) and m(t) for the kernels, their derivative by a learned coefficient, lines for far tiles.

Within a tile distances differ by less than 2·128. Far away a(t) and m(t) hardly bend over so few. A
far tile takes both from straight lines with the smallest possible error. It needs no load per
score. Tiles are far from the first distance on that meets two conditions. For all |S| ≤ 8, the
logits' error is below the rounding of the weights, half a unit in the last place. The logits change
over a tile by at most a bit because of the distance.

The second condition keeps the forward kernel's estimate of the largest logit near to it. For
ScaleInvariant the error of m(t) in base 2 is at most log2(e)·c·127²/(4 (t+τ)²). Here t is at the
tile's near end. The error of 8·a(t) is similar. With c = 2 and τ = 10, tiles are far from t = 2,592
on in bfloat16. In float16 they are far from 7,152. In float32 no tiles are far.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anlit.nn.kernels.formula import distance_tables, tables_are_learned
from anlit.nn.kernels.triton.blocks import PADDING
from anlit.nn.mechanisms.coefficient import Coefficient, learned_coefficients
from anlit.nn.mechanisms.mechanism import Mechanism

LINE_SPACING = 16
"""Tokens from each line to the next. All block sizes are multiples of it."""

FIRST_LINE = PADDING
"""The distance of the first line. The distances of a tile differ by less from the distance of its
first pair."""

TOLERANCES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The largest error of a far tile's logits in base 2, by the dtype of the weights."""

LARGEST_SCORE = 8.0
"""The largest |S| for which the error is bounded; S has a variance of about 1."""

LARGEST_RISE = 1.0
"""The largest change of logits over a far tile, in base 2."""

LONGEST_WITHOUT_LINES = 2048
"""Tokens of a sequence up to which far tiles would not be worth the lines."""


def find_coefficient(mechanism: Mechanism) -> Coefficient | None:
    """The learned coefficient that gives a(t) and m(t) their gradient.

    None unless there is exactly one.
    """
    for coefficient in learned_coefficients(mechanism):
        assert coefficient.value is not None
        with coefficient.replaced_by(coefficient.value.detach()):
            if not tables_are_learned(mechanism):
                return coefficient
    return None


def make_tables(
    mechanism: Mechanism, like: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The operator's `tables`, `coefficient` and `tangents` for queries `like`, (B, H, T, D)."""
    length = like.shape[-2] + PADDING
    width = like.shape[-1]
    a, m = distance_tables(mechanism, length, like)
    tables = interleave(a, m, width)
    if tables is None or not tables.requires_grad:
        return tables, None, None
    coefficient: Any = find_coefficient(mechanism)

    def tables_at(value: Tensor) -> Tensor | None:
        with coefficient.replaced_by(value):
            gains, biases = distance_tables(mechanism, length, like)
        if a is None or not a.requires_grad:
            gains = None
        return interleave(gains, biases, width)

    value = coefficient.value.detach()
    tangents = torch.func.jvp(tables_at, (value,), (torch.ones_like(value),))[1]
    return tables.detach(), coefficient.value, tangents.contiguous()


def interleave(a: Tensor | None, m: Tensor | None, width: int) -> Tensor | None:
    """a(t)/√D and m(t) in base 2 for the kernels: (H or 1, T + PADDING, 2 or 1), float32."""
    biases = None if m is None else (m * math.log2(math.e)).float().reshape(-1, m.shape[-1])
    if a is None:
        return None if biases is None else biases[..., None].contiguous()
    gains = (a * (math.log2(math.e) * width**-0.5)).float().reshape(-1, a.shape[-1])
    biases = torch.zeros_like(gains) if biases is None else biases
    return torch.stack(torch.broadcast_tensors(gains, biases), -1)


def linear_tables(
    tables: Tensor | None, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The lines of all far tiles, and the distance of the first, for heads of `width` in `dtype`.

    The lines are (H or 1, lines, 4 or 2) float32: slope and level of the gain, then of the bias, at
    distance

    LINE_SPACING·index. A tile is far if the distance of its first query and key reaches the second
    result, (H or 1,) int32. Both are None if no tile is far.
    """
    if tables is None or dtype not in TOLERANCES:
        return None, None
    if tables.shape[1] - PADDING <= LONGEST_WITHOUT_LINES:
        return None, None
    reach = 2 * FIRST_LINE - 2  # from a tile's smallest distance to its largest
    spans = tables[:, 1:].unfold(1, reach + 1, LINE_SPACING)  # (H, lines, 2 or 1, distances)
    slopes = (spans[..., -1] - spans[..., 0]) / reach
    steps = torch.arange(1 - FIRST_LINE, FIRST_LINE, device=tables.device, dtype=tables.dtype)
    deviations = spans - slopes[..., None] * steps
    lowest = deviations.amin(-1)
    highest = deviations.amax(-1)
    lines = torch.stack((slopes, (lowest + highest) / 2), -1).flatten(-2)
    largest_product = LARGEST_SCORE * width**0.5  # q·k = √D·S
    logit_error = _change_of_logits((highest - lowest) / 2, largest_product)
    logit_rise = _change_of_logits(slopes.abs() * reach, largest_product)
    is_bent = (logit_error > TOLERANCES[dtype]) | (logit_rise > LARGEST_RISE)
    counts = torch.arange(1, is_bent.shape[1] + 1, device=tables.device, dtype=torch.int32)
    far_start = FIRST_LINE + LINE_SPACING * (is_bent * counts).amax(1)
    # No tile is far before FIRST_LINE: kernels never read the padding.
    return F.pad(lines, (0, 0, FIRST_LINE // LINE_SPACING, 0)), far_start


def _change_of_logits(changes: Tensor, product: float) -> Tensor:
    """The change of logits, (H, lines), by changes of gain and bias, (H, lines, 2 or 1)."""
    if changes.shape[-1] == 1:
        return changes[..., -1]
    return changes[..., 0] * product + changes[..., 1]
