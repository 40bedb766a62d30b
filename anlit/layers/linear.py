"""A linear map whose rows carry a factor: a constant of approximate normalisation, a learned scale, or both."""

import torch
from torch import Tensor, nn


class ScaledLinear(nn.Linear):
    """s ∘ (c · W) x without bias: c a constant, s a vector over the outputs or absent.

    The factors multiply W and not the result, which is the same and touches in·out numbers where the result has
    tokens·out; folding for inference is to store the product.

    Args:
        d_in, d_out: W is (d_out, d_in).
        factor: c.
    """

    def __init__(self, d_in: int, d_out: int, factor: float = 1.0) -> None:
        super().__init__(d_in, d_out, bias=False)
        self.factor = factor

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """x (…, d_in) → (…, d_out); scale (d_out,) or None."""
        weight = self.weight if self.factor == 1 else self.factor * self.weight
        return torch.nn.functional.linear(x, weight if scale is None else scale[:, None] * weight)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, factor={self.factor:.4g}"
