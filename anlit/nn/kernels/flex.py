"""PyTorch's FlexAttention, which compiles the general form, a function of the score, into a kernel.

a(t) and m(t) are tables over the distance, through which learned coefficients get their gradient.
Blocks of logits that are masked as a whole are skipped. The documents at the ends of a block tell
which. So the (T, T) mask is never made.

With the package flash-attn-4, Hopper and Blackwell compute it by FlashAttention-4's kernel. PyTorch
writes the function of the score into it. No GPU has run that.
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
from anlit.nn.kernels.launch_limits import too_many_sequences
from anlit.nn.kernels.sdpa import gpu_generation, has_little_shared_memory
from anlit.nn.mechanisms.mechanism import Mechanism

BLOCK = 128
"""Queries and keys of a block of logits."""

NARROWEST_HEAD = 16
"""The smallest head width that FlexAttention computes."""

RECOMPILE_LIMIT = 64
"""Compilations of a function, for different shapes and mechanisms, before PyTorch stops with a
warning."""

WIDEST_FLASH_HEAD = {9: 256, 10: 128}
"""FlashAttention-4's largest head width, by the major compute capability: Hopper, Blackwell."""


def _has_flash_4() -> bool:
    """Whether flash-attn-4 is installed, without importing flash_attn, perhaps flash-attn 2."""
    package = importlib.util.find_spec("flash_attn")
    folders = getattr(package, "submodule_search_locations", None) or ()
    return any((Path(folder) / "cute" / "interface.py").is_file() for folder in folders)


HAS_FLASH_4 = _has_flash_4()
"""Whether flash-attn-4 is installed, found once."""


def unsupported_reason(mechanism: Mechanism, q: Tensor | None = None) -> str | None:
    """Return a reason against some devices, precisions and widths of `q`, and no mechanism."""
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


def batch_limit(
    mechanism: Mechanism, q: Tensor, documents: Documents, n_rows: int, dropout: float
) -> str | None:
    """Return a reason against batches of very many rows on a GPU."""
    return too_many_sequences(n_rows) if q.device.type == "cuda" else None


def prepare(mechanism: Mechanism, documents: Documents, n_rows: int) -> None:
    """Make the mask of blocks, once for all layers with the same window."""
    block_mask(documents, mechanism.window)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float
) -> Tensor:
    """softmax(a·g·S + m) v, the general form of `formula.py`."""
    a, m = distance_tables(mechanism, q.shape[-2], q)
    q = with_gain(q, mechanism, documents)
    run = _run if torch.compiler.is_compiling() else _compiled()
    return run(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        _without_single_head(a),
        _without_single_head(m),
        block_mask(documents, mechanism.window),
    )


def _without_single_head(table: Tensor | None) -> Tensor | None:
    """(1, T) → (T,), to be looked up without the head. Other tables do not change."""
    if table is not None and table.dim() == 2 and len(table) == 1:
        return table[0]
    return table


def _run(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, m: Tensor | None, mask: BlockMask
) -> Tensor:
    """FlexAttention with tables (T,) or (H, T)."""

    # FlexAttention compiles this function and finds the tables in its closure.
    def change_score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # Keys ahead are masked, but computed if their block is not skipped.
        t = (i - j).clamp(min=0)
        if a is not None:
            s = s * (a[t] if a.dim() == 1 else a[h, t])
        if m is not None:
            s = s + (m[t] if m.dim() == 1 else m[h, t])
        return s

    has_tables = a is not None or m is not None
    options: Any = table_options(q) if has_tables else None
    if runs_on_flash_4(q, a, m):
        options = {"BACKEND": "FLASH"}
    return flex_attention(  # type: ignore[return-value]
        q,
        k,
        v,
        score_mod=change_score if has_tables else None,
        block_mask=mask,
        enable_gqa=k.shape[1] != q.shape[1],
        kernel_options=options,
    )


def table_options(q: Tensor) -> dict[str, Any]:
    """PyTorch's options for kernels that look up a(t) or m(t), for queries like `q`.

    Triton copies the gains and biases of a tile through shared memory ahead of time. It does so
    once per stage after the first. With PyTorch's tiles that takes up to 377 kB. An H200 has 232.
    The tiles here take 156 kB at most, and fit where a block has only 99 KiB.
    `FORCE_USE_FLEX_ATTENTION` keeps short rows from PyTorch's decoding kernel, which has other
    tiles.
    """
    options: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}
    if q.element_size() > 2:
        return options | {"num_stages": 1}
    step = 64 if q.shape[-1] <= 128 else 32
    forward = {"BLOCK_M": 64, "BLOCK_N": step}
    gradients_of_keys = {"BLOCK_M1": step, "BLOCK_N1": 64}
    gradients_of_queries = {"BLOCK_M2": 64, "BLOCK_N2": step}
    n_stages = 1 if q.shape[-1] > 128 and has_little_shared_memory() else 2
    return options | {"num_stages": n_stages} | forward | gradients_of_keys | gradients_of_queries


def runs_on_flash_4(q: Tensor, *tables: Tensor | None) -> bool:
    """Whether FlashAttention-4 can compute it: in 16 bits, and without a gradient of the tables."""
    if not HAS_FLASH_4 or not q.is_cuda or q.element_size() != 2 or q.shape[-1] % 8:
        return False
    are_learned = any(table is not None and table.requires_grad for table in tables)
    return not are_learned and q.shape[-1] <= WIDEST_FLASH_HEAD.get(gpu_generation(), 0)


@cache
def _compiled() -> Callable[..., Tensor]:
    """`_run`, compiled once; outside of `torch.compile` FlexAttention is slow and makes (T, T)."""
    compiled = torch.compile(_run, dynamic=False)

    def run_with_limit(*arguments: Any) -> Tensor:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            return compiled(*arguments)

    return run_with_limit


def block_mask(documents: Documents, window: int | None) -> BlockMask:
    """The blocks of 128 × 128 logits that are visible in part, and the wholly visible blocks.

    They follow from the ids of each block's first and last token. Ids do not decrease along a row.
    The mask is made once per batch.
    """
    if window in documents.flex_masks:
        return documents.flex_masks[window]
    length = documents.length
    ids = documents.ids
    # The first and the last token of each block, of queries and of keys alike
    first = torch.arange(0, length, BLOCK, device=documents.device)
    last = (first + BLOCK - 1).clamp_max(length - 1)
    any_visible = (first <= first[:, None])[None]  # (1, blocks of queries, blocks of keys)
    all_visible = (last <= first[:, None])[None]
    if window is not None:
        any_visible = any_visible & (first[:, None] - last < window)
        all_visible = all_visible & (last[:, None] - first < window)
    if ids is not None:
        # A block of keys shares a document with a block of queries if the id of its last key
        # reaches the id of the first query.
        any_visible = any_visible & (ids[:, None, last] >= ids[:, first, None])
        all_visible = all_visible & (ids[:, None, first] == ids[:, last, None])

    # FlexAttention compiles this function and finds ids and window in its closure.
    def is_visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        visible = j <= i
        if window is not None:
            visible = visible & (i - j < window)
        return visible if ids is None else visible & (ids[b, i] == ids[b, j])

    mask = BlockMask.from_kv_blocks(
        *_list_blocks(any_visible & ~all_visible),
        *_list_blocks(all_visible),
        BLOCK_SIZE=BLOCK,
        mask_mod=is_visible,
        seq_lengths=(length, length),
    )
    documents.flex_masks[window] = mask
    return mask


def _list_blocks(is_listed: Tensor) -> tuple[Tensor, Tensor]:
    """Count the listed blocks of each row, and sort the columns so that the listed come first.

    is_listed (B or 1, rows, columns) → (B or 1, 1, rows) and (B or 1, 1, rows, columns).
    """
    counts = is_listed.sum(-1, dtype=torch.int32)
    columns = is_listed.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[:, None], columns[:, None].contiguous()
