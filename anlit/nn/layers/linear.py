"""The maps that hold matrices: token vectors, and linear maps whose rows carry a factor."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from anlit.nn.layers.sharded import replicated_like


def computing_dtype(x: Tensor) -> torch.dtype:
    """The precision of products with `x`: autocast's if it is on, else the precision of `x`."""
    if x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


class TokenEmbedding(nn.Embedding):
    """The table of token vectors, (V, d). It is not initialised here: the decoder draws it."""

    def reset_parameters(self) -> None:
        """Draws nothing, like `ScaledLinear`."""


class ScaledLinear(nn.Linear):
    """s ∘ (c · W) x without bias: c a constant, s a vector over the outputs or absent.

    The factors multiply W, not the result. So in·out numbers are multiplied instead of tokens·out.
    Folding for inference stores the product. W is not initialised here: the decoder draws it.

    Args:
        d_in, d_out: W is (d_out, d_in).
        factor: c.
    """

    def __init__(self, d_in: int, d_out: int, factor: float = 1.0) -> None:
        super().__init__(d_in, d_out, bias=False)
        self.factor = factor
        self.product: Callable[[Tensor, Tensor], Tensor] = torch.nn.functional.linear
        """Computes x Wᵀ; `anlit.nn.layers.float8` replaces it."""

    def reset_parameters(self) -> None:
        """Draw nothing, so that other modules do not change the initial values of matrices."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """x (…, d_in) → (…, d_out); scale (d_out,) or None."""
        return self.product(x, self.scaled(scale))

    def scaled(self, scale: Tensor | None = None) -> Tensor:
        """diag(s)·c·W, (d_out, d_in)."""
        weight = self.weight if self.factor == 1 else self.factor * self.weight
        return weight if scale is None else scale[:, None] * weight

    @torch.no_grad()
    def scale_rows(self, factors: Tensor) -> None:
        """Multiply row i of W in place with factors[i], (d_out,).

        All ranks pass the same if W is sharded.
        """
        self.weight.mul_(replicated_like(factors, self.weight)[:, None])


def fused_linear(x: Tensor, *maps: ScaledLinear, scales: Sequence[Tensor | None] = ()) -> Tensor:
    """Several linear maps of the same x, side by side: x (…, d_in) → (…, sum of their d_out).

    One product for all maps is faster, and its gradient by x needs no sum. A few tokens take a
    product for each map. To concatenate the weights would cost more. The matrices remain separate
    parameters.

    Args:
        x: The input.
        maps: The maps.
        scales: The vector over the outputs of each map, (d_out,) or None. Empty if no map has a
            vector.
    """
    weights = []
    for linear, scale in zip(maps, scales or [None] * len(maps), strict=True):
        weights.append(linear.scaled(scale))
    product = maps[0].product
    if x.numel() < x.shape[-1] ** 2:
        return torch.cat([product(x, weight) for weight in weights], dim=-1)
    return product(x, torch.cat(weights))
