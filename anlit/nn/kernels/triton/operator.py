"""The kernels as custom operators, opaque to torch.compile and known to autograd.

    anlit::triton_attention(
        q, k, v, coefficient, tables, tangents, lines, far_start, starts, ends, window) -> (out,
        lse)

Query i of head h sees the keys starts_i ≤ j ≤ i with j > i − window, with weights ∝
2^{gain·(q_i·k_j) + bias}.

    q                    (B, H, T, D).
    k, v                 (B, G, T, D), with G a divisor of H.
    coefficient          (H or 1,) or None: a learned number, an argument for its gradient alone.
    tables               (H or 1, T + PADDING, 2) float32: (gain, bias) by distance i − j. With last
                         size 1 the biases alone. If it is None, the gain is log2(e)/√D. Kernels may
                         read entries past distance T − 1 but do not use them.
    tangents             The derivative of the tables by the coefficient. Its last size is 1 if only
                         the biases depend on it.
    lines, far_start     From `linear_tables`, or None.
    starts, ends         (B, T) int32 or None: the bounds of each token's document.
    out                  Stored (B, T, H, D), viewed (B, H, T, D).
    lse                  (B, H, T) float32, in base 2.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from anlit.nn.kernels.formula import empty_heads
from anlit.nn.kernels.triton.blocks import PADDING, Blocks, KernelBlocks, blocks_for

NARROWEST = 16
"""The smallest width of a matrix product of tiles. Narrower heads are padded with zeros."""

LARGEST_AXIS = 65_535
"""The most blocks on the second and on the third axis of a grid of CUDA."""

LONGEST_STRIDE = 2**31 // PADDING - 1
"""The longest stride of tokens. Within a tile kernels compute addresses in 32 bits."""


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
    """Launch the forward kernel. See the top of this file."""
    from anlit.nn.kernels.triton.forward import forward

    _check_inputs(q, k, v, starts)
    _check_table(tables, q)
    _check_table(tangents, q)
    out, lse = _empty_outputs(q)
    q = _with_contiguous_rows(q)
    k = _with_contiguous_rows(k)
    v = _with_contiguous_rows(v)
    T = q.shape[2]
    blocks = _blocks(q).forward
    strides = (*_strides(q, k, v), _head_stride(tables), _head_stride(lines))
    constants = _constants(q, k, tables, blocks)
    with _on(q.device):
        forward[grid(q, blocks.block_m)](
            q, k, v, tables, lines, far_start, starts, out, lse,
            _scale(q), len(q), T, window, *strides, **constants,
        )  # fmt: skip
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
    """Gradients of q, k, v and the coefficient. The coefficient's is empty if it is None."""
    from anlit.nn.kernels.triton.backward_keys import backward_keys
    from anlit.nn.kernels.triton.backward_queries import backward_queries

    dq, dk, dv, d_coefficient = _empty_gradients(d_out, q, k, v, coefficient)
    q = _with_contiguous_rows(q)
    k = _with_contiguous_rows(k)
    v = _with_contiguous_rows(v)
    d_out = _with_contiguous_rows(d_out)
    B, H, T, _ = q.shape
    blocks = _blocks(q)
    delta = torch.empty_like(lse)
    n_blocks = math.ceil(T / blocks.backward_queries.block_m)
    block_sums = None if coefficient is None else lse.new_empty(B, H, n_blocks)
    dk_of_heads = dk if k.shape[1] == H else lse.new_empty(B, T, H, k.shape[-1])
    dv_of_heads = dv if v.shape[1] == H else lse.new_empty(B, T, H, v.shape[-1])
    strides = (*_strides(q, k, v, d_out), _head_stride(tables), _head_stride(lines))
    with _on(q.device):
        constants = _constants(q, k, tables, blocks.backward_queries)
        constants["tangent_pairs"] = tangents is not None and tangents.shape[-1] == 2
        backward_queries[grid(q, blocks.backward_queries.block_m)](
            q, k, v, tables, lines, far_start, tangents, starts, out, lse, d_out, delta, dq,
            block_sums, _scale(q), len(q), T, window, *strides, _head_stride(tangents), **constants,
        )  # fmt: skip
        constants = _constants(q, k, tables, blocks.backward_keys)
        backward_keys[grid(q, blocks.backward_keys.block_n)](
            q, k, v, tables, lines, far_start, starts, ends, lse, d_out, delta, dk_of_heads,
            dv_of_heads, _scale(q), len(q), T, window, *strides, **constants,
        )  # fmt: skip
    if k.shape[1] != H:
        _sum_groups(dk, dk_of_heads)
        _sum_groups(dv, dv_of_heads)
    if block_sums is not None:
        is_per_head = len(d_coefficient) > 1
        d_coefficient.copy_(block_sums.sum((0, 2)) if is_per_head else block_sums.sum()[None])
    return dq, dk, dv, d_coefficient


def _sum_groups(total: Tensor, gradient_of_heads: Tensor) -> None:
    """Sum (B, T, H, D) over the heads of a group into (B, G, T, D), in a fixed order."""
    by_group = gradient_of_heads.unflatten(2, (total.shape[1], -1))
    total.copy_(by_group.sum(3).transpose(1, 2))


@triton_attention.register_fake
def _empty_outputs(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_heads(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@triton_attention_backward.register_fake
def _empty_gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, coefficient: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_coefficient = q.new_empty(0, dtype=torch.float32)
    if coefficient is not None:
        d_coefficient = torch.empty_like(coefficient)
    return empty_heads(q), empty_heads(k), empty_heads(k), d_coefficient


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> None:
    """Assert shapes and precisions: kernels follow pointers, also into other memory."""
    B, H, T, D = q.shape
    assert k.shape == v.shape == (B, k.shape[1], T, D), (q.shape, k.shape, v.shape)
    assert H % k.shape[1] == 0, (q.shape, k.shape)
    assert q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
    if starts is not None:
        assert starts.shape == (B, T), starts.shape
        assert starts.dtype == torch.int32, starts.dtype
        assert starts.is_contiguous()


def _check_table(table: Tensor | None, q: Tensor) -> None:
    """Assert (H or 1, T + PADDING, 2 or 1), float32."""
    if table is None:
        return
    n_heads, length, n_numbers = table.shape
    assert n_heads in (1, q.shape[1]), table.shape
    assert length == q.shape[2] + PADDING, table.shape
    assert n_numbers in (1, 2), table.shape
    assert table.dtype == torch.float32, table.dtype
    assert table.is_contiguous()


def _with_contiguous_rows(x: Tensor) -> Tensor:
    """x itself or a copy with D numbers side by side, and tokens not too far from each other.

    Kernels follow the other strides.
    """
    is_readable = x.stride(-1) == 1 and x.stride(-2) <= LONGEST_STRIDE
    return x if is_readable else x.contiguous()


def grid(q: Tensor, tokens_per_tile: int) -> tuple[int, int, int]:
    """The programs of a kernel: a tile, and the number row·H + head on two axes.

    CUDA allows 65,535 blocks on each of the two, which many short rows exceed on one axis. Programs
    start in the order of the first axis, then of the second and third.
    """
    B, H, T, _ = q.shape
    n_slices = max(1, math.ceil(B * H / LARGEST_AXIS))
    return math.ceil(T / tokens_per_tile), math.ceil(B * H / n_slices), n_slices


def _strides(*tensors: Tensor) -> list[int]:
    """The strides of batch, head and token of each tensor."""
    strides: list[int] = []
    for x in tensors:
        strides += x.stride()[:3]
    return strides


def _head_stride(tables: Tensor | None) -> int:
    """The stride from one head's tables or lines to the next: 0 if all heads share them."""
    return 0 if tables is None or tables.shape[0] == 1 else tables.stride(0)


def _padded_width(q: Tensor) -> int:
    """The smallest power of two that holds D numbers, at least `NARROWEST`."""
    return max(NARROWEST, 1 << (q.shape[-1] - 1).bit_length())


def _blocks(q: Tensor) -> KernelBlocks:
    """The blocks for the heads of `q`, on its device."""
    capability = torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else None
    return blocks_for(_padded_width(q), q.dtype, capability)


def _scale(q: Tensor) -> float:
    """The factor of q·k without a table of gains, log2(e)/√D."""
    return math.log2(math.e) * q.shape[-1] ** -0.5


def _constants(q: Tensor, k: Tensor, tables: Tensor | None, blocks: Blocks) -> dict[str, Any]:
    """The constants for which a kernel is compiled."""
    is_exact = torch.get_float32_matmul_precision() == "highest" or q.dtype != torch.float32
    return {
        "block_m": blocks.block_m,
        "block_n": blocks.block_n,
        "width": q.shape[-1],
        "width_padded": _padded_width(q),
        "n_heads": q.shape[1],
        "group": q.shape[1] // k.shape[1],
        "precision": "ieee" if is_exact else "tf32",
        "pairs": tables is not None and tables.shape[-1] == 2,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` current, because kernels are launched on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, d_out: Tensor, _: Tensor | None):
    *tensors, out, lse = ctx.saved_tensors
    dq, dk, dv, d_coefficient = triton_attention_backward(d_out, *tensors, ctx.window, out, lse)
    if not ctx.needs_input_grad[3]:
        d_coefficient = None
    n_without_gradient = len(ctx.needs_input_grad) - 4
    return dq, dk, dv, d_coefficient, *[None] * n_without_gradient


triton_attention.register_autograd(_backward, setup_context=_setup_context)
