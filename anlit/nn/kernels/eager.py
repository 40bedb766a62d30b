"""The readable back end: the general form written out. Exact, differentiable, any mechanism, any device."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import register_flop_formula

from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.grouped_heads import grouped_product
from anlit.nn.mechanisms.coefficient import learned_coefficients
from anlit.nn.mechanisms.mechanism import Mechanism

QUERIES_PER_BLOCK = 512
"""Queries whose logits over all keys are held at a time."""
SLICES, SMALLEST_SLICE = {"cpu": 4}, 64
"""Parts in which a block is computed, by type of device, and the fewest queries in a part. Its logits fit into the
caches, and keys ahead of it are not read."""


def unsupported_reason(mechanism: Mechanism, q: Tensor | None = None) -> None:
    """This back end can compute every mechanism."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float
) -> Tensor:
    """softmax(a·g·S + m) v for q (B, H, T, D), k and v (B, G, T, D); q and k of unit root mean square.

    Queries are taken in blocks of 512, so memory grows with 512·T and not with T². Keys before a block's window are not
    read. If there are more keys than queries, as with a cache, the queries belong to the last keys.
    """
    n_before = k.shape[-2] - q.shape[-2]
    a, m = distance_tables(mechanism, k.shape[-2], q)
    q = with_gain(q * q.shape[-1] ** -0.5, mechanism, documents)

    def rows(
        first: int, q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, m: Tensor | None
    ) -> Tensor:
        begin, end = first_key(n_before + first, mechanism.window), n_before + first + q.shape[-2]
        logits = _logits(q, k[..., begin:end, :], a, m, documents, mechanism.window, first)
        weights = logits.softmax(-1).to(v.dtype)
        weights = torch.nn.functional.dropout(weights, dropout) if dropout else weights
        return grouped_product(weights, v[..., begin:end, :])

    def block(first: int, q: Tensor, *shared: Any) -> Tensor:
        size = max(SMALLEST_SLICE, math.ceil(q.shape[-2] / SLICES.get(q.device.type, 1)))
        slices = [rows(first + n * size, part, *shared) for n, part in enumerate(q.split(size, -2))]
        return torch.cat(slices, -2) if len(slices) > 1 else slices[0]

    return by_blocks(block, q, k, v, a, m)


def by_blocks(block: Callable[..., Tensor], q: Tensor, *shared: Tensor | None) -> Tensor:
    """`block(first, rows, *shared)` for all rows of q (B, H, T, D), 512 queries at a time: (B, H, T, D). If there are
    several blocks, the backward pass computes each again, so what a block makes is not kept."""
    if q.shape[-2] <= QUERIES_PER_BLOCK:
        return block(0, q, *shared)
    firsts, parts = range(0, q.shape[-2], QUERIES_PER_BLOCK), q.split(QUERIES_PER_BLOCK, -2)
    done = [
        checkpoint(block, *own, *shared, use_reentrant=False)
        for own in zip(firsts, parts, strict=True)
    ]
    return torch.cat(done, -2)


def first_key(first: int, window: int | None) -> int:
    """The first key that some query from `first` on sees, whatever its document."""
    return 0 if window is None else max(0, first - window + 1)


def logits(
    q: Tensor, k: Tensor, mechanism: Mechanism, documents: Documents, first: int, end: int
) -> Tensor:
    """L of queries [first, end) over keys [0, end): (B, H, end − first, end) in float32 at least, −∞ if not visible."""
    a, m = distance_tables(mechanism, end, q)
    rows = with_gain(q * q.shape[-1] ** -0.5, mechanism, documents)[..., first:end, :]
    return _logits(rows, k[..., :end, :], a, m, documents, mechanism.window, first)


def distance_tables(
    mechanism: Mechanism, length: int, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """a(t) and m(t) for t = 0 … length − 1, each (length,), (H or 1, length) or None, in float32 at least."""
    distances = torch.arange(
        length, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32)
    )
    return mechanism.distance_gain(distances), mechanism.distance_bias(distances)


def tables_are_learned(mechanism: Mechanism) -> bool:
    """Whether a(t) or m(t) has a gradient, because of the mechanism's parameters or of what it shares."""
    learned = [
        p for part in (*learned_coefficients(mechanism), mechanism) for p in part.parameters()
    ]
    tables = distance_tables(mechanism, 2, learned[0]) if learned else ()
    return any(table is not None and table.requires_grad for table in tables)


def with_gain(q: Tensor, mechanism: Mechanism, documents: Documents) -> Tensor:
    """g(n_i)·q_i, (B, H, T, D): its product with k is √D·g·S."""
    wide = torch.promote_types(q.dtype, torch.float32)
    gain = mechanism.gain(documents.n_visible(wide, mechanism.window)[:, None])
    return q if gain is None else q * gain[..., None].to(q.dtype)


def _logits(
    q: Tensor,
    k: Tensor,
    a: Tensor | None,
    m: Tensor | None,
    documents: Documents,
    window: int | None,
    first: int,
) -> Tensor:
    """L of queries q, the first of which has index `first`, over keys that end with the last query's own."""
    t = distances(q.shape[-2], k.shape[-2], q.device)
    scores = grouped_product(q, k.mT).to(torch.promote_types(q.dtype, torch.float32))
    bias = masked_bias(m, t, documents, window, first, scores.dtype)
    return scores + bias if a is None else torch.addcmul(bias, scores, a[..., t.clamp_min(0)])


def distances(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    """i − j for keys of which the last ones are the queries' own: (queries, keys) int64, negative if a key is ahead."""
    keys = torch.arange(n_keys, device=device)
    return keys[n_keys - n_queries :, None] - keys


def masked_bias(
    m: Tensor | None,
    t: Tensor,
    documents: Documents,
    window: int | None,
    first: int,
    dtype: torch.dtype,
) -> Tensor:
    """m at distances t, (queries, keys), of queries from number `first` on, −∞ where a key is not visible:
    (B or 1, H or 1, queries, keys)."""
    is_all = t.shape == (documents.length, documents.length)
    visible = documents.mask(window) if is_all else documents.sees(first, t, window)
    values = torch.zeros((), device=t.device) if m is None else m[..., t.clamp_min(0)]
    return torch.where(visible, values.to(dtype), float("-inf"))


def empty_heads(like: Tensor) -> Tensor:
    """Uninitialised (B, H, T, D), in memory as (B, T, H, D), the layout of the projections."""
    B, H, T, D = like.shape
    return like.new_empty(B, T, H, D).transpose(1, 2)


def count_flops(forward: Any, backward: Any, window: int) -> None:
    """Let torch's FLOP counter count a kernel's products over the visible pairs of sequences of one document, without
    recomputation. `window` is the number of this argument among those that follow q.
    """

    def flops(products: int, q_shape: torch.Size, width: int | None) -> int:
        B, H, T, D = q_shape
        seen = T if width is None else min(width, T)
        return 2 * products * D * B * H * (T * seen - math.comb(seen, 2))

    register_flop_formula(forward)(lambda q, *others, **_: flops(2, q, others[window]))
    register_flop_formula(backward)(lambda d_out, q, *others, **_: flops(4, q, others[window]))
