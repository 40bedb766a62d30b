"""Scale-invariant attention ([SI], arXiv 2505.17083, equations 17 and 18.

The general bias is [NOR]'s).
"""

import torch
from torch import Tensor

from anlit.nn.mechanisms.coefficient import Coefficient, Learned
from anlit.nn.mechanisms.mechanism import Mechanism


class ScaleInvariant(Mechanism):
    """a(t) = √(2 ln(1+t/τ) + a₀²), m(t) = −c ln(1+t/τ) + m₀, with a₀ = 1 and m₀ = 0.

    [SI] has c = 2.

    For Gaussian S the expected unnormalised weight at distance t is e^{m + a²/2} = √e·(1 +
    t/τ)^{1−c}. With c = 2 all ranges [t, tΔ) far beyond τ have the same total weight. So attention
    is the same at all scales. A larger c favours near keys, a smaller c far keys.

    Args:
        tau: Distance in tokens below which attention is not yet scale-invariant; [SI] uses 10.
        c: How fast the bias falls with distance.
        learned: Whether c is learned, starting from `c`; [NOR] learns it per layer.
    """

    def __init__(self, tau: float = 10.0, c: float = 2.0, learned: Learned = "never") -> None:
        super().__init__()
        if tau <= 0:
            raise ValueError(f"ScaleInvariant's tau must be positive, not {tau}")
        self.tau = tau
        self.c = c
        self.learned = learned
        self.decay = Coefficient(c, learned)

    def distance_gain(self, t: Tensor) -> Tensor:
        return torch.sqrt(2 * torch.log1p(t / self.tau) + 1)

    def distance_bias(self, t: Tensor) -> Tensor:
        return -self.decay() * torch.log1p(t / self.tau)
