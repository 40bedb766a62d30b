"""Logits that grow like the expected largest of n normal numbers, with its second term ([NOR])."""

import math

import numpy as np
import torch
from torch import Tensor

from anlit.nn.mechanisms.mechanism import Mechanism


class ExpectedMaximum(Mechanism):
    """g(n) = u − (ln ln n' + ln 4π − 2γ)/(2u), u = √(2 ln n'), n' = n + 2, γ Euler's constant.

    Extreme value theory gives this for the largest of n' standard normal numbers. It is 6 % too
    much at n' = 10, 2 % at 100, 0.4 % at 10⁵. n' is n + 2 because ln ln n is not defined at n = 1.
    """

    def gain(self, n: Tensor) -> Tensor:
        log_n = torch.log(n + 2)
        u = torch.sqrt(2 * log_n)
        return u - (torch.log(log_n) + math.log(4 * math.pi) - 2 * np.euler_gamma) / (2 * u)
