"""A gradient written by hand, for compiled code, where Inductor makes one pass of it."""

from typing import Any

import torch
from torch import Tensor


class GainedRMS(torch.autograd.Function):
    """x / √(mean(x²) + eps) · gain over the last axis, x (…, width), gain (width,).

    x̂ is x / √(mean(x²) + eps), and g is the gradient by the result. The gradient by x is
    (g ∘ gain − x̂ mean(g ∘ gain ∘ x̂)) / √(mean(x²) + eps).

    Inductor stores a value that is used more than once and that takes more than four reads. A g
    that comes from a rotation takes four: itself, its partner, cos and sin. So only g is used more
    than once here. Autograd would use g ∘ gain twice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, gain, inverse)
        return x * inverse * gain

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, inverse = ctx.saved_tensors
        along = (upstream * (gain * x)).mean(-1, keepdim=True) * inverse.square()
        dx = (upstream * gain - x * along) * inverse
        dgain = (upstream * (x * inverse)).sum_to_size(gain.shape)
        return dx, dgain, None
