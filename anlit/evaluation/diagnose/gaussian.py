"""Attention mechanisms over independent standard normal scores, without any model.

One query sees n keys at distances t = 0 … n−1 with L = a(t)·g(n)·S_t + m(t), S_t ~ N(0, 1). Statistics are means over
draws of S, which are the same for every mechanism. Expected totals E Σ e^L = Σ e^{m + (a g)²/2} are computed exactly:
with [SI]'s a(t), e^L has such a heavy tail that a mean over draws would not converge.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from anlit.attention import mechanisms
from anlit.attention.mechanism import Mechanism
from anlit.attention.statistics import Range, log_total, ranges, statistics, within
from anlit.errors import UserError

MECHANISMS = "Plain,LogN,SqrtLogN,ScaleInvariant"
# Scores drawn at once: 16 MiB in float32, and a few copies exist.
SCORES = 1 << 22
D_HEAD = 64
"""[SI]'s head width; BetaScaling's exponent depends on it."""


def logits_of(mechanism: Mechanism, scores: Tensor) -> Tensor:
    """L of the last query, with the keys in the order of the text; −∞ outside the window.

    Args:
        mechanism: Made by `for_layer`.
        scores: S, (B, H or 1, 1, n).

    Returns:
        (B, H or 1, 1, n).
    """
    scale, m = distance_functions(mechanism, scores.shape[-1], scores)
    return torch.addcmul(m.flip(-1)[:, None], scores, scale.flip(-1)[:, None])


def distance_functions(mechanism: Mechanism, n: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """a(t)·g(n) and m(t) at t = 0 … n − 1, each (H or 1, n), in the precision of `like`; m is −∞ outside the window."""
    t = torch.arange(n, dtype=like.dtype, device=like.device)
    n_visible = n if mechanism.window is None else min(n, mechanism.window)
    a, m = mechanism.distance_gain(t), mechanism.distance_bias(t)
    g = mechanism.gain(torch.full((1, 1, 1), float(n_visible), dtype=like.dtype, device=like.device))
    scale = (torch.ones_like(t) if a is None else a) * (t.new_ones(1, 1) if g is None else g[0])
    bias = t.new_zeros(1, n) if m is None else m.reshape(-1, n)
    return scale, bias.masked_fill(t >= n_visible, -math.inf)


@torch.no_grad()
def at_length(mechanism: Mechanism, n: int, draws: int, seed: int) -> dict[str, Any]:
    """Statistics of one query with n keys, its own included.

    Args:
        mechanism: Made by `for_layer` for one head.
        n: Number of keys; a window may hide some.
        draws: Number of draws of the scores.
        seed: Seed of the draws, which depend on n but not on the mechanism.

    Returns:
        `mean` and `standard_error` by name, for the statistics of `anlit.attention.statistics.statistics` and for
        `total_1_to_10`, the sum of e^L in [1, 10); only ranges within the n keys. `expected_total_1_to_10` has a mean
        only.
    """
    spans = [span for span in ranges(n - 1) if span.end <= n]
    generator = torch.Generator().manual_seed(seed)
    samples: dict[str, list[Tensor]] = {}
    at_once = max(1, SCORES // n)
    for first in range(0, draws, at_once):
        scores = torch.randn(min(at_once, draws - first), 1, 1, n, generator=generator)
        logits = logits_of(mechanism, scores)
        values = statistics(logits, torch.zeros(1, 1, dtype=torch.long), spans)
        for span in spans:
            values[f"total_{span}"] = log_total(within(logits, span)).double().exp()
        for name, value in values.items():
            samples.setdefault(name, []).append(value.flatten().double())
    summaries: dict[str, Any] = {name: _summary(torch.cat(parts)) for name, parts in samples.items()}
    return summaries | {f"expected_total_{span}": {"mean": expected_total(mechanism, n, span)} for span in spans}


def expected_total(mechanism: Mechanism, n: int, span: Range) -> float:
    """E Σ e^L over the distances in `span`, for a query with n keys: Σ e^{m + (a g)²/2}; NaN if it sees none."""
    functions = distance_functions(mechanism, n, torch.empty(0, dtype=torch.float64))
    scale, m = (part[0, span.first : span.end] for part in functions)
    return log_total(m + scale.square() / 2).exp().item()


def _summary(values: Tensor) -> dict[str, float]:
    return {"mean": values.mean().item(), "standard_error": (values.std() / len(values) ** 0.5).item()}


def named(names: Iterable[str]) -> dict[str, Mechanism]:
    """The shipped mechanisms of these names, in any case, made with default arguments for one head.

    Raises:
        UserError: A name is unknown, or its class needs arguments.
    """
    classes = {known.casefold(): known for known in mechanisms.__all__}
    made: dict[str, Mechanism] = {}
    for name in map(str.strip, names):
        label = classes.get(name.casefold(), "")
        try:
            made[label] = getattr(mechanisms, label)().for_layer(1, D_HEAD, 0)
        except (AttributeError, TypeError) as error:
            raise UserError(
                f"--mechanisms {name!r} is no mechanism with default arguments: choose among "
                + ", ".join(mechanisms.__all__)
            ) from error
    return made
