"""From tensors to kernel launches: pointers, strides, blocks and grids."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from anlit.attention.backends.triton.blocks import Blocks, KernelBlocks, blocks_for

NARROWEST = 16
"""The smallest width of a matrix product of tiles. Narrower heads are padded with zeros."""


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor | None,
    lines: Tensor | None,
    far_start: Tensor | None,
    starts: Tensor | None,
    window: int | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Write `out` and `lse`; shapes as in `operator.py`."""
    from anlit.attention.backends.triton.forward import forward

    q, k, v = (_with_contiguous_rows(x) for x in (q, k, v))
    B, H, T, _ = q.shape
    blocks = own_blocks(q).forward
    with _on(q.device):
        forward[(math.ceil(T / blocks.block_m), B * H)](
            q, k, v, tables, lines, far_start, starts, out, lse, _scale(q), T, window, *_strides(q, k, v),
            _head_stride(tables), _head_stride(lines), **_shapes(q, k, tables), **_sizes(blocks),
        )  # fmt: skip


def launch_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor | None,
    lines: Tensor | None,
    far_start: Tensor | None,
    tangents: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    window: int | None,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    d_coefficient: Tensor | None,
) -> None:
    """Write the gradients into dq, dk, dv and, unless it is None, d_coefficient."""
    from anlit.attention.backends.triton.backward_keys import backward_keys
    from anlit.attention.backends.triton.backward_queries import backward_queries

    q, k, v, d_out = (_with_contiguous_rows(x) for x in (q, k, v, d_out))
    B, H, T, _ = q.shape
    blocks = own_blocks(q)
    delta = torch.empty_like(lse)
    n_blocks = math.ceil(T / blocks.backward_queries.block_m)
    parts = None if d_coefficient is None else lse.new_empty(B, H, n_blocks)
    strides = (*_strides(q, k, v, d_out), _head_stride(tables), _head_stride(lines))
    rest: dict[str, Any] = _shapes(q, k, tables)
    with _on(q.device):
        backward_queries[(n_blocks, B * H)](
            q, k, v, tables, lines, far_start, None if parts is None else tangents, starts, out, lse, d_out, delta, dq,
            parts, _scale(q), T, window, *strides, _head_stride(tangents), **rest, **_sizes(blocks.backward_queries),
            tangent_pairs=tangents is not None and tangents.shape[-1] == 2,
        )  # fmt: skip
        by_head = [dk, dv] if k.shape[1] == H else [lse.new_empty(B, T, H, x.shape[-1]) for x in (k, v)]
        backward_keys[(math.ceil(T / blocks.backward_keys.block_n), B * H)](
            q, k, v, tables, lines, far_start, starts, ends, lse, d_out, delta, *by_head, _scale(q), T, window,
            *strides, **rest, **_sizes(blocks.backward_keys),
        )  # fmt: skip
    if k.shape[1] != H:  # in float32 and always in the same order
        for total, parts_of_heads in zip((dk, dv), by_head, strict=True):
            total.copy_(parts_of_heads.unflatten(2, (k.shape[1], -1)).sum(3).transpose(1, 2))
    if d_coefficient is not None and parts is not None:
        d_coefficient.copy_(parts.sum((0, 2)) if len(d_coefficient) > 1 else parts.sum()[None])


def _with_contiguous_rows(x: Tensor) -> Tensor:
    """`x` with contiguous rows. The kernels follow the other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [x.stride(dim) for x in tensors for dim in range(3)]


def _head_stride(tables: Tensor | None) -> int:
    """The stride from one head's tables or lines to the next: 0 if all heads share them."""
    return 0 if tables is None or tables.shape[0] == 1 else tables.stride(0)


def _padded(q: Tensor) -> int:
    return max(NARROWEST, 1 << (q.shape[-1] - 1).bit_length())


def own_blocks(q: Tensor) -> KernelBlocks:
    """The blocks for heads as those of `q`, on its device."""
    capability = None
    if q.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(q.device)
        capability = 10 * major + minor
    return blocks_for(_padded(q), q.dtype, capability)


def _scale(q: Tensor) -> float:
    """The factor of q·k without a table of gains, log2(e)/√D."""
    return math.log2(math.e) * q.shape[-1] ** -0.5


def _shapes(q: Tensor, k: Tensor, tables: Tensor | None) -> dict[str, Any]:
    exact = torch.get_float32_matmul_precision() == "highest" or q.dtype != torch.float32
    return {
        "n_heads": q.shape[1],
        "group": q.shape[1] // k.shape[1],
        "width": q.shape[-1],
        "width_padded": _padded(q),
        "pairs": tables is not None and tables.shape[-1] == 2,
        "precision": "ieee" if exact else "tf32",
    }


def _sizes(blocks: Blocks) -> dict[str, int]:
    return {
        "block_m": blocks.block_m,
        "block_n": blocks.block_n,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` current: kernels are launched on the current device, whatever the tensors' device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
