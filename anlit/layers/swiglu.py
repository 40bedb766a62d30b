"""The gated activation of the three MLPs (SwiGLU, arXiv 2002.05202)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from anlit.layers.eager import is_trained_eagerly_on_cpu


def swiglu(uz: Tensor) -> Tensor:
    """u ∘ SiLU(z) = u ∘ z ∘ σ(z): (…, 2f), u and then z as one product gives them, → (…, f)."""
    if is_trained_eagerly_on_cpu(uz):
        return _SwiGLU.apply(uz)
    u, z = uz.chunk(2, dim=-1)
    return u * silu(z)


class _SwiGLU(torch.autograd.Function):
    """Keeps σ(z) where autograd keeps SiLU(z), so the backward pass has no exponential, and joins no gradients."""

    @staticmethod
    def forward(ctx: Any, uz: Tensor) -> Tensor:
        u, z = uz.chunk(2, dim=-1)
        sigmoid = z.sigmoid()
        ctx.save_for_backward(uz, sigmoid)
        return (z * sigmoid).mul_(u)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        uz, sigmoid = ctx.saved_tensors
        u, z = uz.chunk(2, dim=-1)
        gradient = torch.empty_like(uz)
        du, dz = gradient.chunk(2, dim=-1)
        activation = z * sigmoid
        torch.mul(upstream, activation, out=du)
        # SiLU'(z) = σ + zσ(1 − σ)
        slope = activation.addcmul_(activation, sigmoid, value=-1).add_(sigmoid)
        torch.mul(slope.mul_(u), upstream, out=dz)
        return gradient
