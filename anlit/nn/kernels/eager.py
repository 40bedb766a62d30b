"""The readable kernel: the general form written out.

Exact, differentiable, any mechanism, any device.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.formula import distance_tables, distances, first_key, masked_bias, with_gain
from anlit.nn.kernels.grouped_heads import grouped_product
from anlit.nn.layers.precision import wide_dtype
from anlit.nn.mechanisms.mechanism import Mechanism

QUERIES_PER_BLOCK = 512
"""Queries in a block. The logits of one block over all keys are in memory at a time."""

CPU_SLICES = 4
"""Slices in which a CPU computes a block. Their logits fit into its caches. Keys ahead are not
read."""

SMALLEST_SLICE = 64
"""The fewest queries in a slice."""


def unsupported_reason(mechanism: Mechanism, q: Tensor | None = None) -> None:
    """This kernel can compute all mechanisms."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float
) -> Tensor:
    """softmax(a·g·S + m) v for q (B, H, T, D), k and v (B, G, T, D).

    q and k of unit root mean square.

    Queries are taken in blocks of 512. So memory grows with 512·T and not with T². Keys ahead of a
    block's window are not read. There may be more keys than queries, as with a cache. Then the
    queries belong to the last keys.
    """
    a, m = distance_tables(mechanism, k.shape[-2], q)
    n_earlier = k.shape[-2] - q.shape[-2]
    q = with_gain(q * q.shape[-1] ** -0.5, mechanism, documents)
    attend_block = partial(
        _attend_block,
        documents=documents,
        window=mechanism.window,
        dropout=dropout,
        n_earlier=n_earlier,
    )
    return by_blocks(attend_block, q, k, v, a, m)


def by_blocks(attend_block: Callable[..., Tensor], q: Tensor, *shared: Tensor | None) -> Tensor:
    """Compute `attend_block(first, q_block, *shared)` for 512 queries at a time: (B, H, T, D).

    `first` is the number of the block's first query. If there are several blocks, the backward pass
    computes each again. So nothing of a block is stored.
    """
    if q.shape[-2] <= QUERIES_PER_BLOCK:
        return attend_block(0, q, *shared)
    outputs = []
    for number, q_block in enumerate(q.split(QUERIES_PER_BLOCK, -2)):
        first = number * QUERIES_PER_BLOCK
        outputs.append(checkpoint(attend_block, first, q_block, *shared, use_reentrant=False))
    return torch.cat(outputs, -2)


def _attend_block(first: int, q: Tensor, *shared: Any, **settings: Any) -> Tensor:
    """Attention of a block of queries. A CPU computes it in slices.

    The arguments are `_attend_slice`'s.
    """
    n_slices = CPU_SLICES if q.device.type == "cpu" else 1
    slice_size = max(SMALLEST_SLICE, math.ceil(q.shape[-2] / n_slices))
    outputs = []
    for number, q_slice in enumerate(q.split(slice_size, -2)):
        outputs.append(_attend_slice(first + number * slice_size, q_slice, *shared, **settings))
    return torch.cat(outputs, -2) if len(outputs) > 1 else outputs[0]


def _attend_slice(
    first: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    m: Tensor | None,
    documents: Documents,
    window: int | None,
    dropout: float,
    n_earlier: int,
) -> Tensor:
    """Attention of queries q, which begin at number `first` and have the factor g/√D.

    `n_earlier` keys of a cache lie before query number 0.
    """
    begin = first_key(n_earlier + first, window)
    end = n_earlier + first + q.shape[-2]
    logits = logits_of_scaled_queries(q, k[..., begin:end, :], a, m, documents, window, first)
    weights = logits.softmax(-1).to(v.dtype)
    if dropout:
        weights = torch.nn.functional.dropout(weights, dropout)
    return grouped_product(weights, v[..., begin:end, :])


def logits_of_queries(
    q: Tensor, k: Tensor, mechanism: Mechanism, documents: Documents, first: int, end: int
) -> Tensor:
    """L of queries [first, end) over keys [0, end): (B, H, end − first, end), −∞ if not visible.

    The result is in float32 at least.
    """
    a, m = distance_tables(mechanism, end, q)
    q = with_gain(q * q.shape[-1] ** -0.5, mechanism, documents)[..., first:end, :]
    return logits_of_scaled_queries(q, k[..., :end, :], a, m, documents, mechanism.window, first)


def logits_of_scaled_queries(
    q: Tensor,
    k: Tensor,
    a: Tensor | None,
    m: Tensor | None,
    documents: Documents,
    window: int | None,
    first: int,
) -> Tensor:
    """L of queries q over keys that end with theirs.

    q has the factor g/√D, and its first query has the number `first`.
    """
    t = distances(q.shape[-2], k.shape[-2], q.device)
    scores = grouped_product(q, k.mT).to(wide_dtype(q))
    bias = masked_bias(m, t, documents, window, first, scores.dtype)
    return scores + bias if a is None else torch.addcmul(bias, scores, a[..., t.clamp_min(0)])
