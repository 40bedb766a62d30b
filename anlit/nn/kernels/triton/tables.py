"""a(t) and m(t) as the kernels read them, their derivative by a learned coefficient, and straight lines for far tiles.

Within a tile distances differ by less than 2·128. Far away a(t) and m(t) hardly bend over so few. There a tile takes
both from the straight lines that are nearest to them, in the sense of the largest error: no load per score. Tiles are
far from where on

    the logits' error is below the rounding of the weights, half a unit in the last place, for every |S| ≤ 8, and
    the logits change over a tile by at most one bit because of the distance.

The second keeps the forward kernel's estimate of the largest logit near to it. For ScaleInvariant the error of m(t) in
base 2 is at most log2(e)·c·127²/(4 (t+τ)²), with t at the tile's near end, and that of 8·a(t) is similar. With
c = 2, τ = 10 and bfloat16, tiles are far from t = 2,592 on, in float16 from 7,152. In float32 none are.
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

STEP = 16
"""Tokens from one line to the next. All block sizes are multiples of it."""
FIRST = PADDING
"""The distance of the first line. A tile's distances differ by less than this from that of its first pair."""
TOLERANCES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The largest error of a far tile's logits in base 2, by the dtype of the weights."""
LARGEST_SCORE = 8.0
"""Of S, which has a variance of about 1."""
LARGEST_RISE = 1.0
SHORTEST = 2048
"""Sequences up to this length have no far tiles that would be worth the lines."""


def coefficient_of(mechanism: Mechanism) -> Coefficient | None:
    """The learned coefficient without which a(t) and m(t) would have no gradient; None if there is no such one."""
    for coefficient in learned_coefficients(mechanism):
        assert coefficient.value is not None
        with coefficient.replaced_by(coefficient.value.detach()):
            if not tables_are_learned(mechanism):
                return coefficient
    return None


def tables_of(
    mechanism: Mechanism, like: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The operator's `tables`, `coefficient` and `tangents` for queries such as `like`, (B, H, T, D)."""
    length, width = like.shape[-2] + PADDING, like.shape[-1]
    a, m = distance_tables(mechanism, length, like)
    tables = interleave(a, m, width)
    if tables is None or not tables.requires_grad:
        return tables, None, None
    coefficient: Any = coefficient_of(mechanism)

    def packed(value: Tensor) -> Tensor | None:
        with coefficient.replaced_by(value):
            gains, biases = distance_tables(mechanism, length, like)
        return interleave(gains if a is not None and a.requires_grad else None, biases, width)

    value = coefficient.value.detach()
    tangents = torch.func.jvp(packed, (value,), (torch.ones_like(value),))[1]
    return tables.detach(), coefficient.value, tangents.contiguous()


def interleave(a: Tensor | None, m: Tensor | None, width: int) -> Tensor | None:
    """a(t) and m(t) for the kernels: (H or 1, T + PADDING, 2 or 1), float32, in base 2, with a divided by √D."""
    biases = None if m is None else (m * math.log2(math.e)).float().reshape(-1, m.shape[-1])
    if a is None:
        return None if biases is None else biases[..., None].contiguous()
    gains = (a * (math.log2(math.e) * width**-0.5)).float().reshape(-1, a.shape[-1])
    biases = torch.zeros_like(gains) if biases is None else biases
    return torch.stack(torch.broadcast_tensors(gains, biases), -1)


def linear_tables(
    tables: Tensor | None, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The lines of all far tiles, and where they begin, for heads of `width` in `dtype`; None and None without any.

    The lines are (H or 1, lines, 4 or 2) float32: slope and level of the gain, then of the bias, at distance
    STEP·index. They begin at (H or 1,) int32, the distance from which on a tile's first query and key are far.
    """
    if tables is None or dtype not in TOLERANCES or tables.shape[1] - PADDING <= SHORTEST:
        return None, None
    spans = tables[:, 1:].unfold(1, 2 * FIRST - 1, STEP)  # (H, lines, 2 or 1, distances)
    slopes = (spans[..., -1] - spans[..., 0]) / (2 * FIRST - 2)
    steps = torch.arange(1 - FIRST, FIRST, device=tables.device, dtype=tables.dtype)
    rest = spans - slopes[..., None] * steps
    lowest, highest = rest.amin(-1), rest.amax(-1)
    lines = torch.stack((slopes, (lowest + highest) / 2), -1).flatten(-2)
    gain_matters = LARGEST_SCORE * width**0.5  # q·k = √D·S
    error = _of_logits((highest - lowest) / 2, gain_matters)
    rise = _of_logits(slopes.abs() * (2 * FIRST - 2), gain_matters)
    is_bent = (error > TOLERANCES[dtype]) | (rise > LARGEST_RISE)
    counts = torch.arange(1, is_bent.shape[1] + 1, device=tables.device, dtype=torch.int32)
    # No tile is far before FIRST, so the lines before it are never read.
    return F.pad(lines, (0, 0, FIRST // STEP, 0)), FIRST + STEP * (is_bent * counts).amax(1)


def _of_logits(changes: Tensor, gain_matters: float) -> Tensor:
    """Changes of gain and bias, or of the bias alone, (H, lines, 2 or 1), as those of logits, (H, lines)."""
    return (
        changes[..., -1]
        if changes.shape[-1] == 1
        else changes[..., 0] * gain_matters + changes[..., 1]
    )
