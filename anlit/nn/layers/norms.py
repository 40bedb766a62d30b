"""The three ways in which the architectures keep activations at a known size.

GPT+ divides by the root mean square (`rms`, `RMSNorm`), nGPT by the length (`unit`). anGPT
multiplies by constants that hold on average over the sphere (the `nu_*` functions). The first two
work in float32 at least.
"""

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, distributed, nn

from anlit.nn.layers.compiled_gradients import GainedRMS
from anlit.nn.layers.cpu_gradients import Normalise, is_trained_eagerly_on_cpu
from anlit.nn.layers.precision import wide_dtype
from anlit.nn.layers.sharded import local_shard

Norms = Literal["bounded", "strict"]
"""The constraint on a weight's vectors after an optimizer step. The norm is at most 1 (anGPT) or
exactly 1 (nGPT)."""


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖₂ over the last axis. Same shape and dtype as x. A zero vector stays zero."""
    wide = x.to(wide_dtype(x))
    if is_trained_eagerly_on_cpu(x):
        return Normalise.apply(wide, None, 0.0, 1.0).to(x.dtype)
    tiny = torch.finfo(wide.dtype).tiny
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp_min(tiny)
    return (wide / norm).to(x.dtype)


def rms(x: Tensor, eps: float, gain: Tensor | None = None) -> Tensor:
    """x / √(mean(x²) + eps) · gain over the last axis. Same shape and dtype as x.

    gain is (width,), or None for 1.
    """
    wide = x.to(wide_dtype(x))
    width = x.shape[-1]
    gain = None if gain is None else gain.to(wide.dtype)
    if is_trained_eagerly_on_cpu(x):
        # rms(x) = √width · x / √(Σx² + width · ε)
        return Normalise.apply(wide, gain, width * eps, math.sqrt(width)).to(x.dtype)
    if gain is not None and torch.compiler.is_compiling():
        return GainedRMS.apply(wide, gain, eps).to(x.dtype)
    return torch.nn.functional.rms_norm(wide, (width,), gain, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """rms(x) · gain. The gain is learned, of shape (width,) and initially 1, or absent."""

    def __init__(self, width: int, eps: float, has_gain: bool = True) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(width)) if has_gain else None

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.eps, self.gain)

    def reset_parameters(self) -> None:
        if self.gain is not None:
            nn.init.ones_(self.gain)


class UnitNorm(nn.Module):
    """factor · x / ‖x‖₂ over the last axis."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return unit(x) if self.factor == 1 else unit(x) * self.factor


# The constants of approximate normalisation ([anGPT], arXiv 2505.22014, section 3): ν = 1/√E‖g(x)‖²
# for x uniform on the unit sphere and weight rows of norm 1. A map W of shape (out, in) with unit
# rows has E‖Wx‖² = ‖x‖²·out/in.


def nu_linear(d_in: int, d_out: int) -> float:
    """√(d_in / d_out): keeps a unit vector's expected norm through (d_out, d_in) with unit rows."""
    return math.sqrt(d_in / d_out)


def nu_activation(sigma: float) -> float:
    """1/√E[SiLU(σx)²], x ~ N(0, 1): 3.72 at σ = 1/2, 1.68 at σ = 1.

    u is a unit vector in d_ff dimensions. The entries of z have the standard deviation σ. The norm
    of u ∘ SiLU(z) concentrates at √E[SiLU(σx)²]. In [anGPT] z is √d_model times a unit vector in
    d_ff dimensions. So σ = √(d_model/d_ff).

    The trapezoidal rule is exact to the last digits for a smooth function that vanishes at both
    ends.
    """
    step = 2.0**-9
    x = np.arange(-12, 12 + step, step)
    z = sigma * x
    silu = z / (1 + np.exp(-z.clip(min=-700)))  # beyond, exp would overflow
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    mean_square = step * (silu * silu * density).sum()
    return float(1 / math.sqrt(mean_square))


def nu_residual(alpha: Tensor) -> Tensor:
    """1/√(α² + (1−α)²), elementwise: keeps the norm of (1−α) ∘ h + α ∘ h' for orthogonal h, h'."""
    return torch.rsqrt(alpha.square() + (1 - alpha).square())


AT_BOUND = 0.999
"""A vector of at least this norm counts as at its bound, 1."""
SMALLEST_DIVISOR = {"bounded": 1.0, "strict": 1e-30}
"""The smallest number that a vector is divided by."""

Constraint = tuple[Tensor, int, Norms]
"""A weight or this rank's shard of it, the axis along which its vectors lie, and the constraint on
them."""


@torch.no_grad()
def restore_norms(constraints: Iterable[Constraint], compiled: bool = False) -> None:
    """Divide each vector w of the weights in place: by ‖w‖ (`strict`) or max(1, ‖w‖) (`bounded`).

    If vectors are split over ranks, the ranks add up the sums of squares. All weights share a
    single collective operation. `compiled` makes the work of a rank a kernel for each matrix
    instead of three.
    """
    whole: list[Constraint] = []
    split: list[Constraint] = []
    split_group = None
    for weight, dim, norms in constraints:
        shard, group = local_shard(weight, dim)
        if group is None:
            whole.append((shard, dim, norms))
        else:
            split.append((shard, dim, norms))
            split_group = group
    divide = _compiled(_divide) if compiled else _divide
    if split_group is None:
        divide(whole)
        return
    sum_squares = _compiled(_sum_squares) if compiled else _sum_squares
    divide_by_roots = _compiled(_divide_by_roots) if compiled else _divide_by_roots
    squares = sum_squares(split)
    pending = distributed.all_reduce(squares, group=split_group, async_op=True)
    assert pending is not None
    divide(whole)  # while the ranks exchange sums
    pending.wait()  # on a GPU the host does not wait
    divide_by_roots(split, squares)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _divide(constraints: list[Constraint]) -> None:
    for shard, dim, norms in constraints:
        norm = torch.linalg.vector_norm(shard, dim=dim, keepdim=True)
        shard.div_(norm.clamp_min(SMALLEST_DIVISOR[norms]))


def _sum_squares(constraints: list[Constraint]) -> Tensor:
    sums = []
    for shard, dim, _ in constraints:
        sums.append(shard.square().sum(dim))
    return torch.cat(sums)


def _divide_by_roots(constraints: list[Constraint], squares: Tensor) -> None:
    lengths = [shard.shape[1 - dim] for shard, dim, _ in constraints]
    for (shard, dim, norms), square in zip(constraints, squares.split(lengths), strict=True):
        shard.div_(square.sqrt().clamp_min(SMALLEST_DIVISOR[norms]).unsqueeze(dim))
