"""PyTorch's FlexAttention: the general form as a function of the score, which it compiles into its kernel.

a(t) and m(t) are tables over the distance, through which learned coefficients get their gradient. Blocks that are
masked as a whole are skipped: the documents at the ends of each block tell which, so the (T, T) mask is never made.

With the package flash-attn-4, Hopper and Blackwell compute it by FlashAttention-4's kernel, into which PyTorch writes
the function of the score. No GPU has run that.
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.formula import distance_tables, with_gain
from anlit.nn.kernels.sdpa import gpu_generation
from anlit.nn.mechanisms.mechanism import Mechanism

BLOCK = 128
NARROWEST_HEAD = 16
RECOMPILE_LIMIT = 64
"""Compilations of a function, for different shapes and mechanisms, before PyTorch stops compiling with a warning."""
WIDEST_FLASH_HEAD = {9: 256, 10: 128}
"""Of FlashAttention-4, by the major compute capability: Hopper, Blackwell."""
_PLACES = getattr(importlib.util.find_spec("flash_attn"), "submodule_search_locations", None) or ()
HAS_FLASH_4 = any((Path(place) / "cute" / "interface.py").is_file() for place in _PLACES)
"""Whether flash-attn-4 is there, found once without importing flash_attn, which flash-attn 2 may be."""


def unsupported_reason(mechanism: Mechanism, q: Tensor | None = None) -> str | None:
    """What of the device, the precision or the width of `q` FlexAttention cannot do."""
    if q is None:
        return None
    if q.device.type not in ("cuda", "cpu"):
        return f"it is not supported on {q.device.type}"
    if q.device.type == "cpu" and q.requires_grad:
        return "FlexAttention has no backward pass on CPU"
    if q.dtype == torch.float64:
        return "FlexAttention does not compute in float64"
    if q.shape[-1] < NARROWEST_HEAD:
        return f"FlexAttention needs a head width of at least {NARROWEST_HEAD}, not {q.shape[-1]}"
    return None


def prepare(mechanism: Mechanism, documents: Documents, n_rows: int) -> None:
    block_mask(documents, mechanism.window)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float
) -> Tensor:
    """softmax(a·g·S + m) v."""
    tables = distance_tables(mechanism, q.shape[-2], q)
    a, m = (
        table[0] if table is not None and len(table) == 1 < table.dim() else table
        for table in tables
    )
    q = with_gain(q, mechanism, documents)
    run = _run if torch.compiler.is_compiling() else _compiled()
    return run(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        a,
        m,
        block_mask(documents, mechanism.window),
    )


def _run(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, m: Tensor | None, visible: BlockMask
) -> Tensor:
    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        t = (i - j).clamp(
            min=0
        )  # keys ahead are masked, but computed if their block is not skipped
        if a is not None:
            s = s * (a[t] if a.dim() == 1 else a[h, t])
        if m is not None:
            s = s + (m[t] if m.dim() == 1 else m[h, t])
        return s

    changes = score if a is not None or m is not None else None
    options: Any = None if changes is None else table_options(q)
    if runs_on_flash_4(q, a, m):
        options = {"BACKEND": "FLASH"}
    return flex_attention(  # type: ignore[return-value]
        q,
        k,
        v,
        score_mod=changes,
        block_mask=visible,
        enable_gqa=k.shape[1] != q.shape[1],
        kernel_options=options,
    )


def table_options(q: Tensor) -> dict[str, Any]:
    """PyTorch's options for kernels that look a(t) or m(t) up, forward and backward, for queries like `q`.

    Triton copies the gains and biases of a tile through shared memory ahead of time, once per
    stage after the first. With PyTorch's own tiles that takes up to 377 kB, and an H200 has 232.
    These tiles take 156 kB at most. `FORCE_USE_FLEX_ATTENTION` keeps
    short rows from PyTorch's decoding kernel, whose tiles are others.
    """
    options: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}
    if q.element_size() > 2:
        return options | {"num_stages": 1}
    step = 64 if q.shape[-1] <= 128 else 32
    forward = {"BLOCK_M": 64, "BLOCK_N": step}
    gradients_of_keys = {"BLOCK_M1": step, "BLOCK_N1": 64}
    gradients_of_queries = {"BLOCK_M2": 64, "BLOCK_N2": step}
    return options | {"num_stages": 2} | forward | gradients_of_keys | gradients_of_queries


def runs_on_flash_4(q: Tensor, *tables: Tensor | None) -> bool:
    """Whether FlashAttention-4's kernel can compute it: in 16 bits, and without a gradient of the tables."""
    if not HAS_FLASH_4 or not q.is_cuda or q.element_size() != 2 or q.shape[-1] % 8:
        return False
    are_learned = any(table is not None and table.requires_grad for table in tables)
    return not are_learned and q.shape[-1] <= WIDEST_FLASH_HEAD.get(gpu_generation(), 0)


@cache
def _compiled() -> Callable[..., Tensor]:
    compiled = torch.compile(_run, dynamic=False)

    def run(*arguments: Any) -> Tensor:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            return compiled(*arguments)

    return run


def block_mask(documents: Documents, window: int | None) -> BlockMask:
    """Which blocks of 128 × 128 logits are visible in part, and which completely, once per batch: from the ids of each
    block's first and last token, because ids do not decrease along a row."""
    if window in documents.flex_masks:
        return documents.flex_masks[window]
    length, ids = documents.length, documents.ids
    first = torch.arange(
        0, length, BLOCK, device=documents.device
    )  # of the queries in a row of blocks, of the keys
    last = (first + BLOCK - 1).clamp_max(length - 1)
    any_visible = (first <= first[:, None])[None]  # (1, blocks of queries, blocks of keys)
    all_visible = (last <= first[:, None])[None]
    if window is not None:
        any_visible = any_visible & (first[:, None] - last < window)
        all_visible = all_visible & (last[:, None] - first < window)
    if ids is not None:
        # A block of keys shares a document with the queries if the id of its last key reaches that of their first.
        any_visible = any_visible & (ids[:, None, last] >= ids[:, first, None])
        all_visible = all_visible & (ids[:, None, first] == ids[:, last, None])

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = j <= i
        if window is not None:
            seen = seen & (i - j < window)
        return seen if ids is None else seen & (ids[b, i] == ids[b, j])

    listed = (*_as_list(any_visible & ~all_visible), *_as_list(all_visible))
    mask = BlockMask.from_kv_blocks(
        *listed, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )
    return documents.flex_masks.setdefault(window, mask)  # type: ignore[no-any-return]


def _as_list(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The number of blocks in each row, (B or 1, 1, rows), and columns with those first, (B or 1, 1, rows, columns)."""
    columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], columns.int()[:, None].contiguous()
