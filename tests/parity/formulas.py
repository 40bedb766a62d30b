"""The logits of each mechanism written out from their formulas, for `naive.py`.

Nothing is imported from anlit. Each logit is a function of the score S_ij, the distance t = i − j,
the number n of visible keys, the head and the block.
"""

import math

import torch
from torch import Tensor

from tests.parity.naive import Block, Logit

EULER = 0.57721566490153286


def plain(score: Tensor, t: int, n: int, head: int, block: Block) -> Tensor:
    return score


def scale_invariant(tau: float, learned: bool = False) -> Logit:
    """The bias falls by 2 log(1 + t/τ), or at a learned rate."""

    def logit(score: Tensor, t: int, n: int, head: int, block: Block) -> Tensor:
        log_distance = math.log(1 + t / tau)
        decay = block.learned("decay", head) if learned else 2
        return math.sqrt(1 + 2 * log_distance) * score - decay * log_distance

    return logit


def log_n(b: float = 1.0, c: float = 0.0, s: float | None = None) -> Logit:
    """The strength is s, or learned."""

    def logit(score: Tensor, t: int, n: int, head: int, block: Block) -> Tensor:
        strength = block.learned("strength", head) if s is None else s
        return strength * math.log(b * n + c) * score

    return logit


def sqrt_log_n(
    a: float = 0.0, b: float = 0.1, c: float = 1.9, r: float | None = None, shared: bool = False
) -> Logit:
    """The strength is r, or learned: by all layers together if shared."""

    def logit(score: Tensor, t: int, n: int, head: int, block: Block) -> Tensor:
        if r is not None:
            strength = r
        elif shared:
            strength = block.learned_globally()
        else:
            strength = block.learned("strength", head)
        return strength * (a + (2 * math.log(b * n + c)) ** 0.5) * score

    return logit


def expected_maximum(score: Tensor, t: int, n: int, head: int, block: Block) -> Tensor:
    root = math.sqrt(2 * math.log(n + 2))
    correction = math.log(math.log(n + 2)) + math.log(4 * math.pi) - 2 * EULER
    return (root - correction / (2 * root)) * score


def beta(d_head: int) -> Logit:
    def logit(score: Tensor, t: int, n: int, head: int, block: Block) -> Tensor:
        return block.learned("strength", head) * n ** (2 / (d_head - 1)) * score

    return logit


def log_bias(tau: float, gained: Logit = plain) -> Logit:
    """`gained` is the logit with g(n) alone."""

    def logit(score: Tensor, t: int, n: int, head: int, block: Block) -> Tensor:
        return gained(score, t, n, head, block) - math.log((tau + t) / tau)

    return logit


def warm_start(share: float, final: Logit) -> Logit:
    """Between plain attention and a mechanism that has only one of a and g different from 1."""

    def logit(score: Tensor, t: int, n: int, head: int, block: Block) -> Tensor:
        bias = final(torch.zeros_like(score), t, n, head, block)
        factor = final(torch.ones_like(score), t, n, head, block) - bias
        return (1 - share) * score + share * (factor * score + bias)

    return logit


def alibi(n_heads: int) -> Logit:
    def logit(score: Tensor, t: int, n: int, head: int, block: Block) -> Tensor:
        return score - t / 256 ** ((head + 1) / n_heads)

    return logit


def log_n_with_slopes(score: Tensor, t: int, n: int, head: int, block: Block) -> Tensor:
    """Strength and slope are parameters of the mechanism itself."""
    strength = block["attention.mechanism.strength"][head]
    slope = block["attention.mechanism.slope"][head]
    return strength * math.log(n) * score - slope * t
