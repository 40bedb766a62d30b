"""Learned scaling vectors with a re-parametrised step size ([nGPT], arXiv 2410.01131, section 2.5)."""

import torch
from torch import Tensor, nn

from anlit.layers.sharded import replicated_like


class ScalingVector(nn.Module):
    """s = ŝ · (init / scale), shape (width,). The stored ŝ starts at `scale`, so s starts at `init`.

    Adam moves every entry of ŝ by about the learning rate, so s moves by lr · init / scale: `scale` sets how
    fast this vector learns relative to the matrices.

    Raises:
        ValueError: `scale` is not positive.
    """

    def __init__(self, width: int, init: float, scale: float) -> None:
        super().__init__()
        if scale <= 0:
            raise ValueError(f"the scale of a scaling vector must be positive, not {scale}")
        self.init, self.scale = init, scale
        self.stored = nn.Parameter(torch.full((width,), float(scale)))

    def forward(self) -> Tensor:
        return self.stored * (self.init / self.scale)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.stored, self.scale)

    @torch.no_grad()
    def multiply(self, factors: Tensor) -> None:
        """s ← factors ∘ s, with factors (width,) that are the same on every rank."""
        self.stored.mul_(replicated_like(factors, self.stored))

    def extra_repr(self) -> str:
        return f"{self.stored.numel()}, init={self.init:g}, scale={self.scale:g}"
