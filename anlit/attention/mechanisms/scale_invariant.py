"""Scale-invariant attention ([SI], arXiv 2505.17083, equations 17 and 18)."""

import torch
from torch import Tensor

from anlit.attention.mechanism import Mechanism


class ScaleInvariant(Mechanism):
    """a(t) = √(2 ln(1+t/τ) + a₀²), m(t) = −2 ln(1+t/τ) + m₀, with a₀ = 1 and m₀ = 0.

    For Gaussian S the expected unnormalised weight at distance t is e^{m + a²/2} = √e/(1 + t/τ), so every range
    [t, tΔ) far beyond τ holds the same total weight: attention looks alike at every scale.

    Args:
        tau: Distance in tokens below which attention is not yet scale-invariant; [SI] uses 10.
    """

    scales_with_distance = True

    def __init__(self, tau: float = 10.0) -> None:
        super().__init__()
        if tau <= 0:
            raise ValueError(f"ScaleInvariant's tau must be positive, not {tau}")
        self.tau = tau

    def distance_gain(self, t: Tensor) -> Tensor:
        return torch.sqrt(2 * torch.log1p(t / self.tau) + 1)

    def distance_bias(self, t: Tensor) -> Tensor:
        return -2 * torch.log1p(t / self.tau)
