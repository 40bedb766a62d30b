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
    """Writes the gradients of u and z where they belong, side by side, in as few passes as there are."""

    @staticmethod
    def forward(ctx: Any, uz: Tensor) -> Tensor:
        u, z = uz.chunk(2, dim=-1)
        activation = silu(z)
        ctx.save_for_backward(uz, activation)
        return activation * u

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        uz, activation = ctx.saved_tensors
        u, z = uz.chunk(2, dim=-1)
        gradient = torch.empty_like(uz)
        du, dz = gradient.chunk(2, dim=-1)
        torch.mul(upstream, activation, out=du)
        torch.mul(upstream, u, out=dz)
        torch.ops.aten.silu_backward.grad_input(dz, z, grad_input=dz)
        return gradient
