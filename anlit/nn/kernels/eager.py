"""The readable kernel: the general form written out. Exact, differentiable, any mechanism, any device."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.formula import distance_tables, distances, first_key, masked_bias, with_gain
from anlit.nn.kernels.grouped_heads import grouped_product
from anlit.nn.mechanisms.mechanism import Mechanism

QUERIES_PER_BLOCK = 512
"""Queries whose logits over all keys are held at a time."""
SLICES, SMALLEST_SLICE = {"cpu": 4}, 64
"""Parts in which a block is computed, by type of device, and the fewest queries in a part. Its logits fit into the
caches, and keys ahead of it are not read."""


def unsupported_reason(mechanism: Mechanism, q: Tensor | None = None) -> None:
    """This kernel can compute every mechanism."""


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


def logits(
    q: Tensor, k: Tensor, mechanism: Mechanism, documents: Documents, first: int, end: int
) -> Tensor:
    """L of queries [first, end) over keys [0, end): (B, H, end − first, end) in float32 at least, −∞ if not visible."""
    a, m = distance_tables(mechanism, end, q)
    rows = with_gain(q * q.shape[-1] ** -0.5, mechanism, documents)[..., first:end, :]
    return _logits(rows, k[..., :end, :], a, m, documents, mechanism.window, first)


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
