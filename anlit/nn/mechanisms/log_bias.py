"""A logarithmic bias towards near keys, combined with any gain g(n) ([NOR])."""

import torch
from torch import Tensor

from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.nn.mechanisms.plain import Plain


class LogBias(Mechanism):
    """m(t) = −ln(1+t/τ), with the g(n) of another mechanism.

    S is Gaussian here. All ranges [t, tΔ) far beyond τ have the same expected weight, as in
    scale-invariant attention. Without the gain a(t) the weight of a far range is spread over more
    keys.

    Args:
        tau: Distance in tokens up to which the bias is small.
        g: The mechanism that gives g(n), such as LogN or SqrtLogN.
    """

    def __init__(self, tau: float = 10.0, g: Mechanism = Plain()) -> None:
        super().__init__()
        if tau <= 0:
            raise ValueError(f"LogBias's tau must be positive, not {tau}")
        self.tau = tau
        self.g = g

    def check(self) -> None:
        if self.g.depends_on_distance:
            name = type(self.g).__name__
            raise ValueError(
                f"LogBias's g must be a mechanism of g(n) alone, but {name} changes logits by "
                "distance: choose Plain, LogN, SqrtLogN, ExpectedMaximum or BetaScaling"
            )

    def gain(self, n: Tensor) -> Tensor | None:
        return self.g.gain(n)

    def distance_bias(self, t: Tensor) -> Tensor:
        return -torch.log1p(t / self.tau)
