"""Learned scaling vectors with a re-parametrised step ([nGPT], arXiv 2410.01131, section 2.5)."""

import torch
from torch import Tensor, nn

from anlit.nn.layers.sharded import replicated_like


def scale_queries_and_keys(q: Tensor, k: Tensor, s_qk: Tensor) -> tuple[Tensor, Tensor]:
    """q ∘ s_qk and k ∘ s_qk, per head and dimension ([nGPT], section 2.3.2). Shapes and dtype stay.

    q is (B, T, H, D), k (B, T, G, D). s_qk is (H·D,), also if heads share keys. Then q takes all of
    it: (q ∘ s)·(k ∘ s) = (q ∘ s²)·k.
    """
    s = s_qk.view(q.shape[2], -1)
    if q.shape[2] == k.shape[2]:
        return (q * s).to(q.dtype), (k * s).to(k.dtype)
    return (q * s.square()).to(q.dtype), k


class ScalingVector(nn.Module):
    """s = ŝ · (init / scale), shape (width,).

    The stored ŝ starts at `scale`. So s starts at `init`.

    Adam moves the entries of ŝ by about the learning rate. So s moves by lr · init / scale. `scale`
    sets how fast this vector learns relative to the matrices.
    """

    def __init__(self, width: int, init: float, scale: float) -> None:
        super().__init__()
        self.init = init
        self.scale = scale
        self.stored = nn.Parameter(torch.full((width,), float(scale)))

    def forward(self) -> Tensor:
        return self.stored * (self.init / self.scale)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.stored, self.scale)

    @torch.no_grad()
    def multiply(self, factors: Tensor) -> None:
        """s ← factors ∘ s, with factors (width,) that are the same on all ranks."""
        self.stored.mul_(replicated_like(factors, self.stored))
