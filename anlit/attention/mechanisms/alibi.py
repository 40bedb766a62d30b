"""Attention with linear biases (ALiBi, arXiv 2108.12409)."""

import torch
from torch import Tensor

from anlit.attention.mechanism import Mechanism


class ALiBi(Mechanism):
    """m(t) = −slope_h·t, slope_h = 2^{−8h/H} for heads h = 1 … H; meant for use without positions.

    The paper combines two such series where H is no power of two; here it is one for every H (our choice).
    """

    replaces_positions = True

    def distance_bias(self, t: Tensor) -> Tensor:
        heads = torch.arange(1, self.n_heads + 1, device=t.device, dtype=t.dtype)
        return -(2 ** (-8 * heads / self.n_heads))[:, None] * t
