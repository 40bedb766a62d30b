"""The kernels as operators of torch: `torch.compile` passes over them, autograd and FLOP counters know them.

    anlit::triton_attention(q, k, v, gains, biases, starts, ends, window) -> (out, lse)

q of shape (B, H, T, D), k and v (B, H_kv, T, D) with H_kv a divisor of H. Query i of head h sees the keys
starts_i ≤ j ≤ i with j > i − window, with weights ∝ 2^{gains[h, i−j]·(q_i·k_j) + biases[h, i−j]}; without gains the
factor is log2(e)/√D. `gains` and `biases` are (H or 1, T) float32; `starts` and `ends` (B, T) int32 are the bounds of
each token's document. out (B, H, T, D) lies in memory as (B, T, H, D); lse (B, H, T) float32 is in base 2.
"""

import math

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from anlit.attention.backends.triton.launch import launch_backward, launch_forward


@torch.library.custom_op("anlit::triton_attention", mutates_args=())
def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gains: Tensor | None,
    biases: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """The forward kernel; see the top of this file."""
    _check(q, k, v, gains, biases, starts, ends)
    out, lse = _outputs(q)
    launch_forward(q, k, v, gains, biases, starts, window, out, lse)
    return out, lse


@torch.library.custom_op("anlit::triton_attention_backward", mutates_args=())
def triton_attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gains: Tensor | None,
    biases: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    window: int | None,
    out: Tensor,
    lse: Tensor,
    of_gains: bool,
    of_biases: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, gains and biases; of a table that is not asked for, an empty one."""
    dq, dk, dv, d_gains, d_biases = _gradients(q, k, gains, biases, of_gains, of_biases)
    launch_backward(
        q, k, v, gains, biases, starts, ends, window, out, lse, d_out, dq, dk, dv,
        d_gains if of_gains else None, d_biases if of_biases else None,
    )  # fmt: skip
    return dq, dk, dv, d_gains, d_biases


@triton_attention.register_fake
def _(q, k, v, gains, biases, starts, ends, window):
    return _outputs(q)


@triton_attention_backward.register_fake
def _(d_out, q, k, v, gains, biases, starts, ends, window, out, lse, of_gains, of_biases):
    return _gradients(q, k, gains, biases, of_gains, of_biases)


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    B, H, T, _ = q.shape
    return _empty_heads(q), q.new_empty(B, H, T, dtype=torch.float32)


def _gradients(
    q: Tensor, k: Tensor, gains: Tensor | None, biases: Tensor | None, of_gains: bool, of_biases: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tables = [
        q.new_empty(0, dtype=torch.float32) if table is None or not asked else torch.empty_like(table)
        for table, asked in ((gains, of_gains), (biases, of_biases))
    ]
    return _empty_heads(q), _empty_heads(k), _empty_heads(k), *tables


def _empty_heads(like: Tensor) -> Tensor:
    """(B, H, T, D) that lies in memory as (B, T, H, D), as the projections around attention want it."""
    B, H, T, D = like.shape
    return like.new_empty(B, T, H, D).transpose(1, 2)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gains: Tensor | None,
    biases: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
) -> None:
    B, H, T, D = q.shape
    assert k.shape == v.shape == (B, k.shape[1], T, D), f"k {tuple(k.shape)}, v {tuple(v.shape)}, q {tuple(q.shape)}"
    assert H % k.shape[1] == 0, f"{k.shape[1]} heads of keys do not divide {H} heads of queries"
    assert q.dtype == k.dtype == v.dtype, f"q {q.dtype}, k {k.dtype}, v {v.dtype}"
    for table in (gains, biases):
        assert table is None or (table.shape in ((1, T), (H, T)) and table.dtype == torch.float32)
    assert (starts is None) == (ends is None)
    for bound in (starts, ends):
        assert bound is None or (bound.shape == (B, T) and bound.dtype == torch.int32 and bound.is_contiguous())


def _setup_context(ctx, inputs, output) -> None:
    *tensors, window = inputs
    out, lse = output
    ctx.save_for_backward(*tensors, out, lse)
    ctx.window = window
    ctx.mark_non_differentiable(lse)


def _backward(ctx, d_out: Tensor, _: Tensor | None):
    *tensors, out, lse = ctx.saved_tensors
    _, _, _, of_gains, of_biases, *_ = ctx.needs_input_grad
    dq, dk, dv, d_gains, d_biases = triton_attention_backward(
        d_out, *tensors, ctx.window, out, lse, of_gains, of_biases
    )
    return dq, dk, dv, d_gains if of_gains else None, d_biases if of_biases else None, None, None, None


triton_attention.register_autograd(_backward, setup_context=_setup_context)


def _flops(q_shape, window: int | None, products: int) -> int:
    """Multiplications and additions of `products` matrix products over the visible pairs of sequences of one document.

    As in `anlit.models.flops`, what the backward pass computes again is not counted, and packed documents, whose
    lengths a shape does not tell, need less.
    """
    B, H, T, D = q_shape
    seen = T if window is None else min(window, T)
    return 2 * products * D * B * H * (T * seen - math.comb(seen, 2))


@register_flop_formula(torch.ops.anlit.triton_attention)
def _forward_flops(q_shape, k_shape, v_shape, gains, biases, starts, ends, window, *_, **__) -> int:
    return _flops(q_shape, window, 2)


@register_flop_formula(torch.ops.anlit.triton_attention_backward)
def _backward_flops(d_out_shape, q_shape, k_shape, v_shape, gains, biases, starts, ends, window, *_, **__) -> int:
    return _flops(q_shape, window, 4)
