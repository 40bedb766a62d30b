"""Gradients written by hand, for training on a CPU without a compiler.

There each pass of autograd goes through memory.

The formulas are in `norms.py`, `swiglu.py` and `positions.py`. Other devices and compilers take
them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu


def is_trained_eagerly_on_cpu(x: Tensor) -> bool:
    """Whether x is on a CPU and needs a gradient, outside of compiled code, which fuses passes."""
    return x.requires_grad and x.device.type == "cpu" and not torch.compiler.is_compiling()


class Normalise(torch.autograd.Function):
    """factor · gain ∘ x / √(Σx² + eps) over the last axis, with a third of autograd's passes.

    x̂ is x / √(Σx² + eps), and g is the gradient by factor · x̂. The gradient by x is
    (g − x̂ (x̂·g)) · factor / √(Σx² + eps).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor | None, eps: float, factor: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        if eps:
            norm = norm.square_().add_(eps).sqrt_()
        inverse = norm.clamp_min_(torch.finfo(x.dtype).tiny).reciprocal_()
        ctx.save_for_backward(x, gain, inverse)
        ctx.factor = factor
        y = x * (inverse * factor)
        return y if gain is None else y.mul_(gain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, inverse = ctx.saved_tensors
        product = upstream * x
        if gain is None:
            along = product.sum(-1, keepdim=True)
            scaled = upstream
            dgain = None
        else:
            along = (product @ gain)[..., None]
            scaled = upstream * gain
            dgain = (product.flatten(0, -2).mT @ inverse.flatten()).mul_(ctx.factor)
        # (along · inverse) · inverse and not along · inverse²: at x = 0 the inverse is near the
        # largest float.
        along.mul_(inverse).mul_(inverse)
        dx = torch.addcmul(scaled, x, along, value=-1)
        dx.mul_(inverse * ctx.factor)
        return dx, dgain, None, None


class SwiGLU(torch.autograd.Function):
    """u ∘ SiLU(z) of (…, 2f), which holds u and then z.

    The backward pass writes the gradients in three passes.
    """

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


class Rotate(torch.autograd.Function):
    """y₁ = x₁ cos − x₂ sin and y₂ = x₂ cos + x₁ sin for the two halves of the rotated width.

    Other dimensions pass. `factors` is (cos, cos, 1 …). The backward pass is the same with −sin.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(factors, sin)
        return _turn(x, factors, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        factors, sin = ctx.saved_tensors
        return _turn(upstream, factors, sin, -1), None, None


def _turn(x: Tensor, factors: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Rotate x, (…, D), by its angles if `direction` is 1, and back if it is −1."""
    half = sin.shape[-1]
    y = x * factors
    y[..., :half].addcmul_(x[..., half : 2 * half], sin, value=-direction)
    y[..., half : 2 * half].addcmul_(x[..., :half], sin, value=direction)
    return y
