"""Mechanisms for tests: the shipped mechanisms at telling settings, and a user's mechanism."""

import torch
from torch import Tensor, nn

import anlit
from anlit.nn.mechanisms.mechanism import Mechanism

WINDOW_OF_TWO = anlit.SlidingWindow(2, anlit.ALiBi())
SHIPPED: dict[str, Mechanism] = {
    "plain": anlit.Plain(),
    "scale-invariant": anlit.ScaleInvariant(tau=3.0),
    "scale-invariant, c per layer": anlit.ScaleInvariant(tau=3.0, c=1.3, learned="per_layer"),
    "log n": anlit.LogN(),
    "log n, fixed": anlit.LogN(s=0.7, learned="never"),
    "log n, shifted": anlit.LogN(s=0.9, learned="per_layer", b=0.3, c=1.5),
    "sqrt log n": anlit.SqrtLogN(r=1.5, a=0.2),
    "sqrt log n, r global": anlit.SqrtLogN(r=1.2, learned="globally"),
    "sqrt log n, r per layer": anlit.SqrtLogN(r=1.2, learned="per_layer", b=0.5, c=1.0),
    "sqrt log n, r per head": anlit.SqrtLogN(learned="per_head"),
    "expected maximum": anlit.ExpectedMaximum(),
    "beta": anlit.BetaScaling(s=0.8, learned="per_head"),
    "log bias": anlit.LogBias(tau=2.0),
    "log bias, r global": anlit.LogBias(tau=2.0, g=anlit.SqrtLogN(learned="globally")),
    "alibi": anlit.ALiBi(),
    "window": anlit.SlidingWindow(3),
    "window, scale-invariant": anlit.SlidingWindow(4, anlit.ScaleInvariant(tau=2.0)),
    "window, log n": anlit.SlidingWindow(3, anlit.LogN()),
    "warm start, scale-invariant": anlit.WarmStart(anlit.ScaleInvariant(tau=2.0), steps=8),
    "warm start, log n": anlit.WarmStart(anlit.LogN(learned="never"), steps=8),
    "pattern": anlit.AttentionPattern([WINDOW_OF_TWO, anlit.SqrtLogN(r=1.2, learned="per_head")]),
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
