"""The logits of each mechanism written out from their formulas, for `naive.py`.

Nothing is imported from anlit. A logit L_ij is a function of a `Pair`: the score S_ij, the distance
t = i − j, and the number n of keys that query i sees.
"""

import math

import torch
from torch import Tensor

from tests.parity.naive import Logit, Pair

EULER = 0.57721566490153286


def plain(pair: Pair) -> Tensor:
    return pair.score


def scale_invariant(tau: float, learned: bool = False) -> Logit:
    """The bias falls by 2 log(1 + t/τ), or at a learned rate."""

    def logit(pair: Pair) -> Tensor:
        log_distance = math.log(1 + pair.t / tau)
        gain = math.sqrt(1 + 2 * log_distance)
        decay = pair.learned("decay") if learned else 2
        return gain * pair.score - decay * log_distance

    return logit


def log_n(b: float = 1.0, c: float = 0.0, s: float | None = None) -> Logit:
    """The strength is s, or learned."""

    def logit(pair: Pair) -> Tensor:
        strength = pair.learned("strength") if s is None else s
        gain = strength * math.log(b * pair.n + c)
        return gain * pair.score

    return logit


def sqrt_log_n(
    a: float = 0.0, b: float = 0.1, c: float = 1.9, r: float | None = None, shared: bool = False
) -> Logit:
    """The strength is r, or learned: by all layers together if shared."""

    def logit(pair: Pair) -> Tensor:
        if r is not None:
            strength = r
        elif shared:
            strength = pair.block.learned_globally()
        else:
            strength = pair.learned("strength")
        gain = strength * (a + math.sqrt(2 * math.log(b * pair.n + c)))
        return gain * pair.score

    return logit


def expected_maximum(pair: Pair) -> Tensor:
    log_n = math.log(pair.n + 2)
    root = math.sqrt(2 * log_n)
    correction = math.log(log_n) + math.log(4 * math.pi) - 2 * EULER
    gain = root - correction / (2 * root)
    return gain * pair.score


def beta(d_head: int) -> Logit:
    def logit(pair: Pair) -> Tensor:
        exponent = 2 / (d_head - 1)
        gain = pair.learned("strength") * pair.n**exponent
        return gain * pair.score

    return logit


def log_bias(tau: float, gained: Logit = plain) -> Logit:
    """`gained` is the logit with g(n) alone."""

    def logit(pair: Pair) -> Tensor:
        bias = -math.log((tau + pair.t) / tau)
        return gained(pair) + bias

    return logit


def warm_start(share: float, final: Logit) -> Logit:
    """Between plain attention and a mechanism in which a or g is 1."""

    def logit(pair: Pair) -> Tensor:
        zero = torch.zeros_like(pair.score)
        bias = final(pair._replace(score=zero))
        gain = final(pair._replace(score=zero + 1)) - bias
        return (1 - share) * pair.score + share * (gain * pair.score + bias)

    return logit


def alibi(n_heads: int) -> Logit:
    """The slopes of the heads are 2^(−8/H), 2^(−16/H), … 2^(−8)."""

    def logit(pair: Pair) -> Tensor:
        slope = 256 ** (-(pair.head + 1) / n_heads)
        return pair.score - slope * pair.t

    return logit


def log_n_with_slopes(pair: Pair) -> Tensor:
    """Strength and slope are parameters of the mechanism itself."""
    strength = pair.block["attention.mechanism.strength"][pair.head]
    slope = pair.block["attention.mechanism.slope"][pair.head]
    return strength * math.log(pair.n) * pair.score - slope * pair.t
