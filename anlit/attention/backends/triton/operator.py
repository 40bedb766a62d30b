"""The kernels as custom operators: opaque to `torch.compile`, known to autograd and the FLOP counter.

    anlit::triton_attention(
        q, k, v, coefficient, tables, tangents, lines, far_start, starts, ends, window) -> (out, lse)

q of shape (B, H, T, D), k and v (B, H_kv, T, D) with H_kv a divisor of H. Query i of head h sees the keys
starts_i ≤ j ≤ i with j > i − window, with weights ∝ 2^{gain·(q_i·k_j) + bias}. `tables`, (H or 1, T + PADDING, 2)
float32, holds (gain, bias) by distance i−j. With last size 1 it holds the biases only, and None is for no biases: the
gain is then log2(e)/√D. Kernels may read entries past distance T − 1 but do not use them. `lines` and `far_start` are
what `lines.py` makes of the tables, or None. `starts` and `ends`, (B, T) int32, are the bounds of each token's
document. out is stored (B, T, H, D), viewed (B, H, T, D); lse (B, H, T) float32 is in base 2.

`coefficient`, (H or 1,) or None, is a learned number on which the tables depend, and `tangents`, of shape (H or 1,
T + PADDING, 2 or 1) like the tables, their derivative by it; of last size 1 if only the biases depend on it. The
coefficient is there for its gradient alone, as the tables themselves get none.
"""

import math

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from anlit.attention.backends.triton.blocks import PADDING
from anlit.attention.backends.triton.launch import launch_backward, launch_forward


@torch.library.custom_op("anlit::triton_attention", mutates_args=())
def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coefficient: Tensor | None,
    tables: Tensor | None,
    tangents: Tensor | None,
    lines: Tensor | None,
    far_start: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """The forward kernel; see the top of this file."""
    _check(q, k, v, tables, starts, ends)
    _check_coefficient(q, coefficient, tangents)
    out, lse = _outputs(q)
    launch_forward(q, k, v, tables, lines, far_start, starts, window, out, lse)
    return out, lse


@torch.library.custom_op("anlit::triton_attention_backward", mutates_args=())
def triton_attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coefficient: Tensor | None,
    tables: Tensor | None,
    tangents: Tensor | None,
    lines: Tensor | None,
    far_start: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    window: int | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the coefficient; that of the coefficient is empty if it is None."""
    dq, dk, dv, d_coefficient = _gradients(q, k, coefficient)
    written = None if coefficient is None else d_coefficient
    bounds, results = (starts, ends, window, out, lse), (dq, dk, dv, written)
    launch_backward(q, k, v, tables, lines, far_start, tangents, *bounds, d_out, *results)
    return dq, dk, dv, d_coefficient


@triton_attention.register_fake
def _(q, *_):
    return _outputs(q)


@triton_attention_backward.register_fake
def _(d_out, q, k, v, coefficient, *_):
    return _gradients(q, k, coefficient)


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    B, H, T, _ = q.shape
    return _empty_heads(q), q.new_empty(B, H, T, dtype=torch.float32)


def _gradients(q: Tensor, k: Tensor, coefficient: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_coefficient = q.new_empty(0, dtype=torch.float32) if coefficient is None else torch.empty_like(coefficient)
    return _empty_heads(q), _empty_heads(k), _empty_heads(k), of_coefficient


def _empty_heads(like: Tensor) -> Tensor:
    """Uninitialised (B, H, T, D), in memory as (B, T, H, D), the layout of the projections."""
    B, H, T, D = like.shape
    return like.new_empty(B, T, H, D).transpose(1, 2)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
) -> None:
    B, H, T, D = q.shape
    assert k.shape == v.shape == (B, k.shape[1], T, D), f"k {tuple(k.shape)}, v {tuple(v.shape)}, q {tuple(q.shape)}"
    assert H % k.shape[1] == 0, f"{k.shape[1]} heads of keys do not divide {H} heads of queries"
    assert q.dtype == k.dtype == v.dtype, f"q {q.dtype}, k {k.dtype}, v {v.dtype}"
    if tables is not None:
        assert tuple(tables.shape) in [(h, T + PADDING, n) for h in (1, H) for n in (1, 2)], tables.shape
        assert tables.dtype == torch.float32
        assert tables.is_contiguous()
    assert (starts is None) == (ends is None)
    for bound in (starts, ends):
        if bound is not None:
            assert bound.shape == (B, T), bound.shape
            assert bound.dtype == torch.int32
            assert bound.is_contiguous()


def _check_coefficient(q: Tensor, coefficient: Tensor | None, tangents: Tensor | None) -> None:
    assert (coefficient is None) == (tangents is None)
    if coefficient is not None and tangents is not None:
        _, H, T, _ = q.shape
        assert coefficient.shape in [(1,), (H,)], coefficient.shape
        assert tuple(tangents.shape) in [(h, T + PADDING, n) for h in (1, H) for n in (1, 2)], tangents.shape
        assert tangents.is_contiguous()


def _setup_context(ctx, inputs, output) -> None:
    *tensors, window = inputs
    out, lse = output
    ctx.save_for_backward(*tensors, out, lse)
    ctx.window = window
    ctx.mark_non_differentiable(lse)


def _backward(ctx, d_out: Tensor, _: Tensor | None):
    *tensors, out, lse = ctx.saved_tensors
    dq, dk, dv, d_coefficient = triton_attention_backward(d_out, *tensors, ctx.window, out, lse)
    return dq, dk, dv, d_coefficient if ctx.needs_input_grad[3] else None, *[None] * 7


triton_attention.register_autograd(_backward, setup_context=_setup_context)


def _flops(q_shape, window: int | None, products: int) -> int:
    """Multiplications and additions of `products` matrix products over the visible pairs of sequences of one document.

    As in `anlit.models.flops`, recomputation in the backward pass is not counted. Packed documents need less, but
    shapes do not tell their lengths.
    """
    B, H, T, D = q_shape
    seen = T if window is None else min(window, T)
    return 2 * products * D * B * H * (T * seen - math.comb(seen, 2))


@register_flop_formula(torch.ops.anlit.triton_attention)
def _forward_flops(q_shape, *others, **__) -> int:
    return _flops(q_shape, others[9], 2)


@register_flop_formula(torch.ops.anlit.triton_attention_backward)
def _backward_flops(d_out_shape, q_shape, *others, **__) -> int:
    return _flops(q_shape, others[9], 4)
