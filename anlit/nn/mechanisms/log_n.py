"""Logits that grow with the logarithm of the number of keys: LogN, or scalable softmax."""

import torch
from torch import Tensor

from anlit.nn.mechanisms.coefficient import Coefficient, Learned
from anlit.nn.mechanisms.mechanism import Mechanism


class LogN(Mechanism):
    """g(n) = s·ln(b·n + c).

    With b = 1, c = 0 it is LogN ([SI]) or scalable softmax (arXiv 2501.19399).

    [NOR] shifts the count, as with b = 0.1 and c = 1.9. Then g(1) is s·ln 2 instead of 0. g grows
    from about n = c/b on. Short contexts then have nearly the same gain.

    Args:
        s: Strength; [SI] learns it from 0.4.
        learned: Whether s is learned.
        b: Factor of the count, not negative.
        c: Added to b·n; b + c must be at least 1, so that g is never negative.
    """

    def __init__(
        self, s: float = 0.4, learned: Learned = "per_head", b: float = 1.0, c: float = 0.0
    ) -> None:
        super().__init__()
        check_count(self, b, c)
        self.s = s
        self.learned = learned
        self.b = b
        self.c = c
        self.strength = Coefficient(s, learned)

    def gain(self, n: Tensor) -> Tensor:
        return self.strength() * torch.log(self.b * n + self.c)


def check_count(mechanism: Mechanism, b: float, c: float) -> None:
    """Raise ValueError unless ln(b·n + c) ≥ 0 for every count n ≥ 1."""
    if b < 0 or b + c < 1:
        name = type(mechanism).__name__
        raise ValueError(
            f"{name}'s b must not be negative and b + c not below 1, where ln(b n + c) < 0: "
            f"b={b}, c={c}"
        )
