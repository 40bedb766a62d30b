"""Mechanisms that the package does not ship, as a user would write them."""

import torch
from torch import Tensor, nn

from anlit.attention.mechanism import Mechanism


class LogN(Mechanism):
    """g(n) = s·ln n, s learned per head and layer."""

    def __init__(self, start: float = 0.4) -> None:
        super().__init__()
        self.start = start

    def for_layer(self, n_heads: int, d_head: int, layer: int) -> Mechanism:
        mechanism = LogN(self.start)
        mechanism.strength = nn.Parameter(torch.full((n_heads,), self.start))
        return mechanism

    def gain(self, n: Tensor) -> Tensor:
        return self.strength[:, None] * n.log()


class LogNWithSlopes(LogN):
    """The same with the bias m(t) = −slope·t, the slope learned per head: everything but a gain per distance."""

    def for_layer(self, n_heads: int, d_head: int, layer: int) -> Mechanism:
        mechanism = LogNWithSlopes(self.start)
        mechanism.strength = nn.Parameter(torch.full((n_heads,), self.start))
        mechanism.slope = nn.Parameter(2.0 ** -torch.arange(1.0, n_heads + 1))
        return mechanism

    def distance_bias(self, t: Tensor) -> Tensor:
        return -self.slope[:, None] * t
