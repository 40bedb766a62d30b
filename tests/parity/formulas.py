"""The logits of each mechanism written out from their formulas, for `naive.py`; nothing is imported from anlit.

Each is a function of the score S_ij, the distance t = i − j, the number n of visible keys, the head and the block.
"""

import math

import torch
from torch import Tensor

from tests.parity.naive import Block, Logit


def plain(score: Tensor, t: int, n: int, head: int, block: Block) -> Tensor:
    return score


def scale_invariant(tau: float, learned: bool = False) -> Logit:
    """The bias falls by 2 log(1 + t/τ), or at a learned rate."""

    def logit(score: Tensor, t: int, n: int, head: int, block: Block) -> Tensor:
        distance = math.log(1 + t / tau)
        return (
            math.sqrt(1 + 2 * distance) * score
            - (block.learned("decay", head) if learned else 2) * distance
        )

    return logit


def log_n(b: float = 1.0, c: float = 0.0, s: float | None = None) -> Logit:
    """The strength s is learned unless it is given."""
    return lambda score, t, n, head, block: (
        (block.learned("strength", head) if s is None else s) * math.log(b * n + c) * score
    )


def sqrt_log_n(
    a: float = 0.0, b: float = 0.1, c: float = 1.9, r: float | None = None, shared: bool = False
) -> Logit:
    """The strength is r, or learned: by all layers together if shared."""

    def logit(score: Tensor, t: int, n: int, head: int, block: Block) -> Tensor:
        learned = block.learned_globally if shared else lambda: block.learned("strength", head)
        strength = learned() if r is None else r
        return strength * (a + (2 * math.log(b * n + c)) ** 0.5) * score

    return logit


def expected_maximum(score: Tensor, t: int, n: int, head: int, block: Block) -> Tensor:
    euler = 0.57721566490153286
    root = math.sqrt(2 * math.log(n + 2))
    return (
        root - (math.log(math.log(n + 2)) + math.log(4 * math.pi) - 2 * euler) / (2 * root)
    ) * score


def beta(d_head: int) -> Logit:
    return lambda score, t, n, head, block: (
        block.learned("strength", head) * n ** (2 / (d_head - 1)) * score
    )


def log_bias(tau: float, other: Logit = plain) -> Logit:
    return lambda score, t, n, head, block: (
        other(score, t, n, head, block) - math.log((tau + t) / tau)
    )


def warm_start(share: float, other: Logit) -> Logit:
    """Between plain attention and a mechanism of which only one of a and g differs from 1."""

    def logit(score: Tensor, t: int, n: int, head: int, block: Block) -> Tensor:
        bias = other(torch.zeros_like(score), t, n, head, block)
        factor = other(torch.ones_like(score), t, n, head, block) - bias
        return (1 - share) * score + share * (factor * score + bias)

    return logit


def alibi(n_heads: int) -> Logit:
    return lambda score, t, n, head, block: score - t / 256 ** ((head + 1) / n_heads)


def log_n_with_slopes(score: Tensor, t: int, n: int, head: int, block: Block) -> Tensor:
    """Strength and slope are parameters of the mechanism itself."""
    strength, slope = (
        block["attention.mechanism.strength"][head],
        block["attention.mechanism.slope"][head],
    )
    return strength * math.log(n) * score - slope * t
