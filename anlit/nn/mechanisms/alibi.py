"""Attention with linear biases (ALiBi, arXiv 2108.12409)."""

import math

import torch
from torch import Tensor

from anlit.nn.mechanisms.mechanism import Mechanism


class ALiBi(Mechanism):
    """m(t) = −slope_h·t. Meant for use without positions.

    If H is a power of two, slope_h = 2^{−8h/H} for h = 1 … H. Otherwise P is the largest power of
    two below H. Then P heads have the slopes for H = P. The remaining heads have every second slope
    for H = 2P, as in the paper's code.
    """

    replaces_positions = True

    def distance_bias(self, t: Tensor) -> Tensor:
        power = 2 ** int(math.log2(self.n_heads))
        heads = torch.arange(1, power + 1, device=t.device, dtype=t.dtype)
        n_remaining = self.n_heads - power
        odd = 1 + 2 * torch.arange(n_remaining, device=t.device, dtype=t.dtype)
        exponents = torch.cat((-8 * heads / power, -8 * odd / (2 * power)))
        return -(2**exponents)[:, None] * t
