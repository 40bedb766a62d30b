"""Attention mechanisms on independent standard normal scores. `anlit diagnose` compares models with this.

A query that sees n keys at distances t = 0 … n−1 has the logits L = a(t)·g(n)·S_t + m(t), S_t ~ N(0, 1).
"""

import math

import torch
from torch import Tensor

from anlit.attention.mechanism import Mechanism
from anlit.attention.statistics import participation

SCORES = 1 << 20
"""Scores drawn for one number of keys: 4 MiB in float32, and 4 MiB per head if the heads differ."""
FEWEST_DRAWS, MOST_DRAWS = 64, 1 << 17


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
def expected_participation(mechanism: Mechanism, n: Tensor, seed: int = 0) -> Tensor:
    """E Σ w² with w the softmax of L, estimated from draws of S to a few percent: (H or 1, N) float32.

    Args:
        mechanism: Made by `for_layer`, on the device of n.
        n: (N,) numbers of keys, whole numbers ≥ 1.
        seed: Seed of the draws, which are the same for every mechanism.
    """
    columns = []
    for count in n.tolist():
        size = int(count)
        generator = torch.Generator().manual_seed(seed)
        draws = min(MOST_DRAWS, max(FEWEST_DRAWS, SCORES // size))
        scores = torch.randn(draws, 1, 1, size, generator=generator).to(n.device)
        columns.append(participation(logits_of(mechanism, scores)).mean((0, 2)))
    return torch.stack(columns, -1)
