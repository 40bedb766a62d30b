"""Our own attention for CPUs: every mechanism costs about as much as plain attention. 128 queries are a block.

Gradients are written by hand, so no T × T matrix is ever made. Keys that no query of a block can see are skipped. The
tables of a and m over distance are stored as one matrix that all blocks slice, so no index per pair is needed. The
causal mask and the window are −∞ in the matrix of m and cost nothing extra.

The kernel is a custom operator, opaque to `torch.compile`, known to autograd and the FLOP counter:

    anlit::blockwise_attention(q, k, v, a, m, starts, window, keeps) -> (out, kept)

q and out are (B, H, T, D), k and v (B, G, T, D), see `grouped_heads.py`. a and m are tables over distance, (T,)
or (H or 1, T), or None if trivial. `starts`, (B, T), is where the document of each token begins; None for one document.
A query sees the keys from there to its own, and at most `window` of them.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.formula import count_flops, distance_tables, empty_heads, with_gain
from anlit.nn.kernels.grouped_heads import grouped_product
from anlit.nn.mechanisms.mechanism import Mechanism

QUERIES = 128
"""Queries in a block: enough for a matrix product, few enough that little above the diagonal is wasted."""
KEPT_WEIGHTS = 2**22
"""Attention weights of a layer that are kept for the backward pass at most (16 MB in float32). More of them it computes
again, from the logits' log-sum-exp."""


def unsupported_reason(mechanism: Mechanism, q: Tensor | None = None) -> str | None:
    """That the model is not on a CPU."""
    if q is None or q.device.type == "cpu":
        return None
    return f"it is made for CPUs, and the model is on {q.device.type}"


def attend(
    q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float
) -> Tensor:
    """softmax(a·g·S + m) v, computed in float32 at least."""
    a, m = distance_tables(mechanism, q.shape[-2], q)
    q, dtype = with_gain(q, mechanism, documents), v.dtype
    starts, _ = documents.bounds or (None, None)
    keeps = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, a, m)
    )
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    return blockwise_attention(q, k, v, a, m, starts, mechanism.window, keeps)[0].to(dtype)


def prepare(mechanism: Mechanism, documents: Documents, n_rows: int) -> None:
    """Find where the documents begin, once for all layers."""
    _ = documents.bounds


class Block(NamedTuple):
    """Queries [first, end) of sequences [row, end_row), and the keys [begin, end) that some of them see; `queries` and
    `keys` are their parts of x, (B, H, T, …), as views."""

    row: int
    end_row: int
    begin: int
    first: int
    end: int

    def queries(self, x: Tensor) -> Tensor:
        return x[self.row : self.end_row, :, self.first : self.end]

    def keys(self, x: Tensor) -> Tensor:
        return x[self.row : self.end_row, :, self.begin : self.end]


def blocks(n_rows: int, length: int, starts: Tensor | None, window: int | None) -> list[Block]:
    """The blocks of all sequences together or, with documents, of each sequence, which skips keys of its own."""
    firsts = range(0, length, QUERIES)
    groups = [(0, n_rows, [0] * len(firsts))]
    if starts is not None:
        groups = [
            (row, row + 1, begins) for row, begins in enumerate(starts[:, ::QUERIES].tolist())
        ]
    nearest = length if window is None else window
    return [
        Block(row, end_row, max(begin, first - nearest + 1), first, min(first + QUERIES, length))
        for row, end_row, begins in groups
        for first, begin in zip(firsts, begins, strict=True)
    ]


class Tables:
    """a and m over distance, as matrices for blocks, in the precision of `like`.

    The last key of a block is at its last query. So the matrix of every block is the lower right part of one
    QUERIES × T matrix, whose entry (x, y) is for the distance (T − 1 − y) − (QUERIES − 1 − x). Invisible keys have
    m = −∞.
    """

    def __init__(
        self, a: Tensor | None, m: Tensor | None, length: int, window: int | None, like: Tensor
    ) -> None:
        self.length, self.window, self.has_bias = length, window, m is not None
        distance = (length - torch.arange(length)) - (QUERIES - torch.arange(QUERIES)[:, None])
        self.index = distance.clamp(0, length - 1)
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        values = (
            like.new_zeros(1, 1, 1) if m is None else m.to(like).reshape(-1, length)[:, self.index]
        )
        self.bias = torch.where(visible, values, -math.inf)
        self.gain = None if a is None else a.to(like).reshape(-1, length)[:, self.index]

    def part(self, matrix: Tensor, block: Block) -> Tensor:
        """The block's part of a matrix (H or 1, QUERIES, T), a view."""
        return matrix[
            :, QUERIES - (block.end - block.first) :, self.length - (block.end - block.begin) :
        ]

    def to_logits(self, scores: Tensor, block: Block, starts: Tensor | None) -> Tensor:
        """a·scores + m, −∞ where a key is not visible: in place, scores (sequences, H, queries, keys)."""
        if self.gain is not None:
            scores.mul_(self.part(self.gain, block))
        if self.has_bias or (self.window is not None and block.end - block.begin > self.window):
            scores.add_(self.part(self.bias, block))
        else:  # only keys at the positions of the queries may be ahead of a query
            n = block.end - block.first
            scores[..., -n:].add_(self.bias[:, -n:, -n:])
        if starts is not None:
            begins = starts[block.row : block.end_row, block.first : block.end]
            if begins[0, -1] > block.begin:  # else all queries of the block are in one document
                keys = torch.arange(block.begin, block.end)
                scores.masked_fill_((keys < begins[..., None])[:, None], -math.inf)
        return scores

    def by_distance(self, total: Tensor, like: Tensor) -> Tensor:
        """Sum `total` (H or 1, QUERIES, T) over equal distances; returns the shape of `like`, (T,) or (H or 1, T)."""
        sums = total.new_zeros(len(total), self.length).index_add_(
            1, self.index.flatten(), total.flatten(1)
        )
        return sums.to(like.dtype).reshape(like.shape)


@torch.library.custom_op("anlit::blockwise_attention", mutates_args=())
def blockwise_attention(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, m: Tensor | None, starts: Tensor | None, window: int | None,
    keeps: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The average of v and, if `keeps`, what the backward pass needs, see `_kept`. All tensors have one precision."""
    out, kept, offset = empty_heads(q), _kept(q, window, keeps), 0
    length, width = q.shape[-2:]
    with torch.autocast(q.device.type, enabled=False):
        rows, k, v = (x.contiguous() for x in (q * width**-0.5, k, v))
        tables = Tables(a, m, length, window, q)
        for block in blocks(len(q), length, starts, window):
            logits = tables.to_logits(
                grouped_product(block.queries(rows), block.keys(k).mT), block, starts
            )
            if kept.dim() == 1 and kept.numel():
                weights = kept[offset : offset + logits.numel()].view(logits.shape)
                torch.softmax(logits, -1, out=weights)
                offset += logits.numel()
            else:
                weights = logits.softmax(-1)
                if kept.numel():  # log Z, because the largest weight is exp(largest logit)/Z
                    block.queries(kept)[:] = logits.amax(-1) - weights.amax(-1).log()
            block.queries(out)[:] = grouped_product(weights, block.keys(v))
    return out, kept


@torch.library.custom_op("anlit::blockwise_attention_backward", mutates_args=())
def blockwise_attention_backward(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, m: Tensor | None, starts: Tensor | None,
    window: int | None, kept: Tensor, of_tables: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, a and m; those of a and m are empty without `of_tables`."""
    length, width = q.shape[-2:]
    dq, offset = torch.empty_like(q, memory_format=torch.contiguous_format), 0
    with torch.autocast(q.device.type, enabled=False):
        rows, k, v, upstream = (x.contiguous() for x in (q * width**-0.5, k, v, upstream))
        tables = Tables(a, m, length, window, q)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        d_gain = torch.zeros_like(tables.gain) if of_tables and tables.gain is not None else None
        d_bias = torch.zeros_like(tables.bias) if of_tables and m is not None else None
        for block in blocks(len(q), length, starts, window):
            queries, keys, gradient = block.queries(rows), block.keys(k), block.queries(upstream)
            if kept.dim() == 1:
                shape = (*queries.shape[:3], keys.shape[2])
                weights = kept[offset : offset + math.prod(shape)].view(shape)
                offset += math.prod(shape)
            else:
                logits = tables.to_logits(grouped_product(queries, keys.mT), block, starts)
                weights = logits.sub_(block.queries(kept)[..., None]).exp_()
            _add_transposed_product(block.keys(dv), weights, gradient)
            d_weights = grouped_product(gradient, block.keys(v).mT)
            d_logits = torch.ops.aten._softmax_backward_data.out(
                d_weights, weights, -1, q.dtype, grad_input=d_weights
            )
            if d_bias is not None:
                part = tables.part(d_bias, block)
                part += d_logits.sum_to_size(part.shape)
            if d_gain is not None:
                part = tables.part(d_gain, block)
                part += (d_logits * grouped_product(queries, keys.mT)).sum_to_size(part.shape)
            if tables.gain is not None:
                d_logits.mul_(tables.part(tables.gain, block))
            torch.mul(grouped_product(d_logits, keys), width**-0.5, out=block.queries(dq))
            _add_transposed_product(block.keys(dk), d_logits, queries)
        none = q.new_zeros(0)
        da = none if d_gain is None or a is None else tables.by_distance(d_gain, a)
        dm = none.clone() if d_bias is None or m is None else tables.by_distance(d_bias, m)
    return dq, dk, dv, da, dm


def _add_transposed_product(total: Tensor, *factors: Tensor) -> None:
    """total (B, G, K, D) += xᵀ y, summed over the heads of a group; x (B, H, N, K), y (B, H, N, D)."""
    flat = total.view(-1, *total.shape[2:])
    x, y = (
        factor.reshape(len(flat), -1, factor.shape[-1]) for factor in factors
    )  # a view if G is H
    flat.baddbmm_(x.mT, y)


def _kept(q: Tensor, window: int | None, keeps: bool) -> Tensor:
    """Memory for all weights, block after block; for log Z, (B, H, T), if they are too many; none without `keeps`."""
    B, H, T, _ = q.shape
    if not keeps:
        return q.new_empty(0)
    n_weights = (
        sum((b.end - b.first) * (b.end - b.begin) for b in blocks(1, T, None, window)) * B * H
    )
    return q.new_empty(n_weights) if n_weights <= KEPT_WEIGHTS else q.new_empty(B, H, T)


@blockwise_attention.register_fake
def _(q, k, v, a, m, starts, window, keeps):
    return empty_heads(q), _kept(q, window, keeps)


@blockwise_attention_backward.register_fake
def _(upstream, q, k, v, a, m, starts, window, kept, of_tables):
    tables = (
        torch.empty_like(t) if of_tables and t is not None else q.new_empty(0) for t in (a, m)
    )
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
    ) + tuple(tables)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.window, _ = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, upstream: Tensor, _: Tensor | None):
    *tensors, kept = ctx.saved_tensors
    wants_a, wants_m = ctx.needs_input_grad[3:5]
    *gradients, da, dm = blockwise_attention_backward(
        upstream, *tensors, ctx.window, kept, wants_a or wants_m
    )
    return *gradients, da if wants_a else None, dm if wants_m else None, None, None, None


blockwise_attention.register_autograd(_backward, setup_context=_setup_context)
count_flops(
    torch.ops.anlit.blockwise_attention, torch.ops.anlit.blockwise_attention_backward, window=5
)
