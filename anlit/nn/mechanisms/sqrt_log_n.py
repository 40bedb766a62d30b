"""Logits that grow like the largest of n normal numbers, √(2 log n) ([NOR])."""

import torch
from torch import Tensor

from anlit.nn.mechanisms.coefficient import Coefficient, Learned
from anlit.nn.mechanisms.log_n import check_count
from anlit.nn.mechanisms.mechanism import Mechanism


class SqrtLogN(Mechanism):
    """g(n) = r·(a + √(2 ln(b·n + c))).

    The largest of n standard normal scores is about √(2 ln n). The next follow at distances of
    order 1/√(2 ln n). A gain of this size keeps the weight on the largest from vanishing as n
    grows. A smaller gain does not. With r > 1, E[1/w_max] stays below 1 + 1/(r−1), if a = 0, b = 1,
    c = 0. With b = 0.1, c = 1.9 it does for r = 1.5 and 2 up to n = 10⁵. At r = 1 it grows slowly,
    to 6.1 at n = 10⁵.

    Args:
        r: Strength. Our default of 1 is the border between a weight that vanishes and a weight that
            stays.
        learned: Whether r is learned.
        a: Added to the root.
        b: Factor of the count, not negative; [NOR] uses 0.1.
        c: Added to b·n; [NOR] uses 1.9, so that g(1) = r·√(2 ln 2). b + c must be at least 1.
    """

    def __init__(
        self,
        r: float = 1.0,
        learned: Learned = "never",
        a: float = 0.0,
        b: float = 0.1,
        c: float = 1.9,
    ) -> None:
        super().__init__()
        check_count(self, b, c)
        self.r = r
        self.learned = learned
        self.a = a
        self.b = b
        self.c = c
        self.strength = Coefficient(r, learned)

    def gain(self, n: Tensor) -> Tensor:
        return self.strength() * (self.a + torch.sqrt(2 * torch.log(self.b * n + self.c)))
