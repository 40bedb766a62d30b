"""The kernels as custom operators, opaque to torch.compile, known to autograd and the FLOP counter.

    anlit::triton_attention(
        q, k, v, coefficient, tables, tangents, lines, far_start, starts, ends, window) -> (out,
        lse)

q is (B, H, T, D), k and v (B, G, T, D) with G a divisor of H. Query i of head h sees the keys
starts_i ≤ j ≤ i with j > i − window, with weights ∝ 2^{gain·(q_i·k_j) + bias}. `tables`, (H or 1, T
+ PADDING, 2) float32, holds (gain, bias) by distance i−j; with last size 1 the biases only, and
None is for no biases: the gain is then log2(e)/√D. Kernels may read entries past distance T − 1 but
do not use them. `lines` and `far_start` are what `linear_tables` makes of them, or None. `starts`
and `ends`, (B, T) int32, are the bounds of each token's document. out is stored (B, T, H, D),
viewed (B, H, T, D); lse (B, H, T) float32 is in base 2. `coefficient`, (H or 1,) or None, is a
learned number on which the tables depend, there for its gradient alone, and `tangents` the tables'
derivative by it; of last size 1 if only the biases depend on it.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from anlit.nn.kernels.formula import count_flops, empty_heads
from anlit.nn.kernels.triton.blocks import PADDING, Blocks, KernelBlocks, blocks_for

NARROWEST = 16
"""The smallest width of a matrix product of tiles. Narrower heads are padded with zeros."""


@torch.library.custom_op("anlit::triton_attention", mutates_args=())
def triton_attention(
    q: Tensor, k: Tensor, v: Tensor, coefficient: Tensor | None, tables: Tensor | None,
    tangents: Tensor | None, lines: Tensor | None, far_start: Tensor | None, starts: Tensor | None,
    ends: Tensor | None, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The forward kernel; see the top of this file."""
    from anlit.nn.kernels.triton.forward import forward

    _check(q, k, v, starts, tables, tangents)
    out, lse = _outputs(q)
    q, k, v = (_with_contiguous_rows(x) for x in (q, k, v))
    B, H, T, _ = q.shape
    blocks = _blocks(q).forward
    with _on(q.device):
        forward[(math.ceil(T / blocks.block_m), B * H)](
            q, k, v, tables, lines, far_start, starts, out, lse, _scale(q), T, window, *_strides(q,
            k, v), _head_stride(tables), _head_stride(lines), **_constants(q, k, tables, blocks),
        )  # fmt: skip
    return out, lse


@torch.library.custom_op("anlit::triton_attention_backward", mutates_args=())
def triton_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, coefficient: Tensor | None,
    tables: Tensor | None, tangents: Tensor | None, lines: Tensor | None, far_start: Tensor | None,
    starts: Tensor | None, ends: Tensor | None, window: int | None, out: Tensor, lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and the coefficient; that of the coefficient is empty if it is None."""
    from anlit.nn.kernels.triton.backward_keys import backward_keys
    from anlit.nn.kernels.triton.backward_queries import backward_queries

    dq, dk, dv, d_coefficient = _gradients(d_out, q, k, v, coefficient)
    q, k, v, d_out = (_with_contiguous_rows(x) for x in (q, k, v, d_out))
    B, H, T, _ = q.shape
    blocks = _blocks(q)
    delta = torch.empty_like(lse)
    n_blocks = math.ceil(T / blocks.backward_queries.block_m)
    parts = None if coefficient is None else lse.new_empty(B, H, n_blocks)
    strides = (*_strides(q, k, v, d_out), _head_stride(tables), _head_stride(lines))
    with _on(q.device):
        backward_queries[(n_blocks, B * H)](
            q, k, v, tables, lines, far_start, tangents, starts, out, lse, d_out, delta, dq, parts,
            _scale(q), T, window, *strides, _head_stride(tangents), **_constants(q, k, tables,
            blocks.backward_queries),
            tangent_pairs=tangents is not None and tangents.shape[-1] == 2,
        )  # fmt: skip
        by_head = (
            [dk, dv] if k.shape[1] == H else [lse.new_empty(B, T, H, x.shape[-1]) for x in (k, v)]
        )
        backward_keys[(math.ceil(T / blocks.backward_keys.block_n), B * H)](
            q, k, v, tables, lines, far_start, starts, ends, lse, d_out, delta, *by_head, _scale(q),
            T, window, *strides, **_constants(q, k, tables, blocks.backward_keys),
        )  # fmt: skip
    if k.shape[1] != H:  # in float32 and always in the same order
        for total, parts_of_heads in zip((dk, dv), by_head, strict=True):
            total.copy_(parts_of_heads.unflatten(2, (k.shape[1], -1)).sum(3).transpose(1, 2))
    if parts is not None:
        d_coefficient.copy_(parts.sum((0, 2)) if len(d_coefficient) > 1 else parts.sum()[None])
    return dq, dk, dv, d_coefficient


@triton_attention.register_fake
def _outputs(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_heads(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@triton_attention_backward.register_fake
def _gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, coefficient: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_coefficient = (
        q.new_empty(0, dtype=torch.float32)
        if coefficient is None
        else torch.empty_like(coefficient)
    )
    return empty_heads(q), empty_heads(k), empty_heads(k), of_coefficient


def _check(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, *tables: Tensor | None) -> None:
    """Kernels follow pointers: what does not fit would be read from other memory."""
    B, H, T, D = q.shape
    assert k.shape == v.shape == (B, k.shape[1], T, D), (q.shape, k.shape, v.shape)
    assert H % k.shape[1] == 0, (q.shape, k.shape)
    assert q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
    for table in tables:
        assert table is None or tuple(table.shape) in [
            (h, T + PADDING, n) for h in (1, H) for n in (1, 2)
        ], table.shape
        assert table is None or (table.dtype, table.is_contiguous()) == (torch.float32, True)
    assert starts is None or (starts.shape, starts.dtype, starts.is_contiguous()) == (
        (B, T),
        torch.int32,
        True,
    )


def _with_contiguous_rows(x: Tensor) -> Tensor:
    """The kernels follow the other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [x.stride(dim) for x in tensors for dim in range(3)]


def _head_stride(tables: Tensor | None) -> int:
    """The stride from one head's tables or lines to the next: 0 if all heads share them."""
    return 0 if tables is None or tables.shape[0] == 1 else tables.stride(0)


def _padded(q: Tensor) -> int:
    return max(NARROWEST, 1 << (q.shape[-1] - 1).bit_length())


def _blocks(q: Tensor) -> KernelBlocks:
    """The blocks for heads as those of `q`, on its device."""
    capability = torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else None
    return blocks_for(_padded(q), q.dtype, capability)


def _scale(q: Tensor) -> float:
    """The factor of q·k without a table of gains, log2(e)/√D."""
    return math.log2(math.e) * q.shape[-1] ** -0.5


def _constants(q: Tensor, k: Tensor, tables: Tensor | None, blocks: Blocks) -> dict[str, Any]:
    """What a kernel is compiled for."""
    exact = torch.get_float32_matmul_precision() == "highest" or q.dtype != torch.float32
    return {
        "block_m": blocks.block_m, "block_n": blocks.block_n, "width": q.shape[-1],
        "width_padded": _padded(q), "n_heads": q.shape[1], "group": q.shape[1] // k.shape[1],
        "precision": "ieee" if exact else "tf32",
        "pairs": tables is not None and tables.shape[-1] == 2, "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }  # fmt: skip


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
    return dq, dk, dv, d_coefficient if ctx.needs_input_grad[3] else None, *[None] * 7


triton_attention.register_autograd(_backward, setup_context=_setup_context)
count_flops(
    torch.ops.anlit.triton_attention, torch.ops.anlit.triton_attention_backward, window_index=9
)
