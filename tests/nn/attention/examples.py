"""Mechanisms for tests: the shipped mechanisms at telling settings, and a user's mechanism."""

import torch
from torch import Tensor, nn

from anlit import (
    ALiBi,
    AttentionPattern,
    BetaScaling,
    ExpectedMaximum,
    LogBias,
    LogN,
    Plain,
    ScaleInvariant,
    SlidingWindow,
    SqrtLogN,
    WarmStart,
)
from anlit.nn.mechanisms.mechanism import Mechanism

WINDOW_OF_TWO = SlidingWindow(2, ALiBi())
SHIPPED: dict[str, Mechanism] = {
    "plain": Plain(),
    "scale-invariant": ScaleInvariant(tau=3.0),
    "scale-invariant, c per layer": ScaleInvariant(tau=3.0, c=1.3, learned="per_layer"),
    "log n": LogN(),
    "log n, fixed": LogN(s=0.7, learned="never"),
    "log n, shifted": LogN(s=0.9, learned="per_layer", b=0.3, c=1.5),
    "sqrt log n": SqrtLogN(r=1.5, a=0.2),
    "sqrt log n, r global": SqrtLogN(r=1.2, learned="globally"),
    "sqrt log n, r per layer": SqrtLogN(r=1.2, learned="per_layer", b=0.5, c=1.0),
    "sqrt log n, r per head": SqrtLogN(learned="per_head"),
    "expected maximum": ExpectedMaximum(),
    "beta": BetaScaling(s=0.8, learned="per_head"),
    "log bias": LogBias(tau=2.0),
    "log bias, r global": LogBias(tau=2.0, g=SqrtLogN(learned="globally")),
    "alibi": ALiBi(),
    "window": SlidingWindow(3),
    "window, scale-invariant": SlidingWindow(4, ScaleInvariant(tau=2.0)),
    "window, log n": SlidingWindow(3, LogN()),
    "warm start, scale-invariant": WarmStart(ScaleInvariant(tau=2.0), steps=8),
    "warm start, log n": WarmStart(LogN(learned="never"), steps=8),
    "pattern": AttentionPattern([WINDOW_OF_TWO, SqrtLogN(r=1.2, learned="per_head")]),
}
LEARNED = {name: mechanism for name, mechanism in SHIPPED.items() if list(mechanism.parameters())}


class LogNWithSlopes(Mechanism):
    """g(n) = s·ln n and m(t) = −slope·t, with s and slope learned per head."""

    strength: nn.Parameter
    slope: nn.Parameter

    def __init__(self, start: float = 0.4) -> None:
        super().__init__()
        self.start = start

    def for_layer(self, n_heads: int, d_head: int, layer: int) -> Mechanism:
        mechanism = LogNWithSlopes(self.start)
        mechanism.strength = nn.Parameter(torch.full((n_heads,), self.start))
        mechanism.slope = nn.Parameter(2.0 ** -torch.arange(1.0, n_heads + 1))
        return mechanism

    def gain(self, n: Tensor) -> Tensor:
        return self.strength[:, None] * n.log()

    def distance_bias(self, t: Tensor) -> Tensor:
        return -self.slope[:, None] * t
