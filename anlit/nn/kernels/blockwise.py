"""Attention for CPUs: all mechanisms cost about as much as plain attention.

128 queries are a block. Gradients are written by hand. So no T × T matrix is ever made. Keys that
no query of a block can see are skipped. The tables of a and m over distance are a matrix that all
blocks slice. So no pair needs an index. The causal mask and the window are −∞ in the matrix of m.
They cost nothing extra.

The kernel is a custom operator, opaque to `torch.compile` and known to autograd:

    anlit::blockwise_attention(q, k, v, a, m, starts, window, needs_gradients) -> (out, saved)

q and out are (B, H, T, D), k and v (B, G, T, D), see `grouped_heads.py`. a and m are tables over
distance, (T,) or (H or 1, T), or None if trivial. `starts`, (B, T), is the first token of each
token's document. None for one document. A query sees the keys from there to its own, and at most
`window` of them. `saved` is empty without `needs_gradients`, else all attention weights or, if they
are too many, log Z.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.formula import distance_tables, empty_heads, with_gain
from anlit.nn.kernels.grouped_heads import grouped_product
from anlit.nn.layers.precision import wide_dtype
from anlit.nn.mechanisms.mechanism import Mechanism

QUERIES = 128
"""Queries in a block. They are enough for a matrix product. Little above the diagonal is wasted."""

LARGEST_SAVED = 2**22
"""Attention weights of a layer that are saved for the backward pass at most (16 MB in float32). The
backward pass computes more of them again, from the logits' log-sum-exp."""


def unsupported_reason(mechanism: Mechanism, q: Tensor | None = None) -> str | None:
    """Return a reason against devices that are not a CPU."""
    if q is None or q.device.type == "cpu":
        return None
    return f"it is made for CPUs, and the model is on {q.device.type}"


def attend(
    q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float
) -> Tensor:
    """softmax(a·g·S + m) v, computed in float32 at least."""
    a, m = distance_tables(mechanism, q.shape[-2], q)
    q = with_gain(q, mechanism, documents)
    starts, _ = documents.bounds or (None, None)
    inputs = [x for x in (q, k, v, a, m) if x is not None]
    needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    out, _ = blockwise_attention(
        q.to(wide_dtype(q)),
        k.to(wide_dtype(k)),
        v.to(wide_dtype(v)),
        a,
        m,
        starts,
        mechanism.window,
        needs_gradients,
    )
    return out.to(v.dtype)


@dataclass(frozen=True)
class Block:
    """Queries [first, end) of rows [row, end_row), and the keys [begin, end) that they see."""

    row: int
    end_row: int
    begin: int
    first: int
    end: int

    @property
    def n_queries(self) -> int:
        return self.end - self.first

    @property
    def n_keys(self) -> int:
        return self.end - self.begin

    def queries(self, x: Tensor) -> Tensor:
        """The block's queries in x, (B, H, T, …), as a view."""
        return x[self.row : self.end_row, :, self.first : self.end]

    def keys(self, x: Tensor) -> Tensor:
        """The block's keys in x, (B, G, T, …), as a view."""
        return x[self.row : self.end_row, :, self.begin : self.end]


def find_blocks(n_rows: int, length: int, starts: Tensor | None, window: int | None) -> list[Block]:
    """The blocks of all rows together or, with documents, of each row.

    Blocks skip the keys of earlier documents.
    """
    if starts is None:
        return _blocks_of_rows(0, n_rows, length, [0] * math.ceil(length / QUERIES), window)
    blocks: list[Block] = []
    for row, begins in enumerate(starts[:, ::QUERIES].tolist()):
        blocks += _blocks_of_rows(row, row + 1, length, begins, window)
    return blocks


def _blocks_of_rows(
    row: int, end_row: int, length: int, begins: list[int], window: int | None
) -> list[Block]:
    """The blocks of rows [row, end_row).

    The document of block number i's first query begins at begins[i].
    """
    blocks = []
    for number, begin in enumerate(begins):
        first = number * QUERIES
        if window is not None:
            begin = max(begin, first - window + 1)
        end = min(first + QUERIES, length)
        blocks.append(Block(row, end_row, begin, first, end))
    return blocks


class Tables:
    """a and m over distance, as matrices for blocks, in the precision of `like`.

    The last key of a block is at its last query. So all blocks share a QUERIES × T matrix. A block
    has its lower right corner. Entry (x, y) has the distance (T − 1 − y) − (QUERIES − 1 − x).
    Invisible keys have m = −∞.
    """

    def __init__(
        self, a: Tensor | None, m: Tensor | None, length: int, window: int | None, like: Tensor
    ) -> None:
        self.length = length
        self.window = window
        self.has_bias = m is not None
        distance = (length - torch.arange(length)) - (QUERIES - torch.arange(QUERIES)[:, None])
        self.index = distance.clamp(0, length - 1)
        is_visible = distance >= 0
        if window is not None:
            is_visible = is_visible & (distance < window)
        bias = like.new_zeros(1, 1, 1) if m is None else self._matrix(m, like)
        self.bias = torch.where(is_visible, bias, -math.inf)
        self.gain = None if a is None else self._matrix(a, like)

    def _matrix(self, table: Tensor, like: Tensor) -> Tensor:
        """A table (T,) or (H or 1, T) as a matrix (H or 1, QUERIES, T)."""
        return table.to(like).reshape(-1, self.length)[:, self.index]

    def corner(self, matrix: Tensor, block: Block) -> Tensor:
        """The block's entries of a matrix (H or 1, QUERIES, T), a view."""
        return matrix[:, QUERIES - block.n_queries :, self.length - block.n_keys :]

    def to_logits(self, scores: Tensor, block: Block, starts: Tensor | None) -> Tensor:
        """Turn scores, (rows, H, queries, keys), into a·scores + m, −∞ for invisible keys."""
        if self.gain is not None:
            scores.mul_(self.corner(self.gain, block))
        if self.has_bias or (self.window is not None and block.n_keys > self.window):
            scores.add_(self.corner(self.bias, block))
        else:
            # Only keys at the positions of the queries may be ahead of a query.
            n = block.n_queries
            scores[..., -n:].add_(self.bias[:, -n:, -n:])
        if starts is not None:
            begins = starts[block.row : block.end_row, block.first : block.end]
            are_in_one_document = begins[0, -1] <= block.begin
            if not are_in_one_document:
                keys = torch.arange(block.begin, block.end)
                scores.masked_fill_((keys < begins[..., None])[:, None], -math.inf)
        return scores

    def sum_by_distance(self, matrix: Tensor, like: Tensor) -> Tensor:
        """Sum (H or 1, QUERIES, T) over equal distances, in the shape of `like`."""
        sums = matrix.new_zeros(len(matrix), self.length)
        sums.index_add_(1, self.index.flatten(), matrix.flatten(1))
        return sums.to(like.dtype).reshape(like.shape)


class SavedWeights:
    """Memory for the backward pass: all weights, block after block, or log Z (B, H, T)."""

    def __init__(self, saved: Tensor) -> None:
        self.saved = saved
        self.has_weights = saved.dim() == 1 and saved.numel() > 0
        self.has_log_z = saved.dim() > 1
        self._offset = 0

    def next_weights(self, shape: tuple[int, ...]) -> Tensor:
        """The weights of the next block, a view of the memory."""
        size = math.prod(shape)
        weights = self.saved[self._offset : self._offset + size].view(shape)
        self._offset += size
        return weights


@torch.library.custom_op("anlit::blockwise_attention", mutates_args=())
def blockwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    m: Tensor | None,
    starts: Tensor | None,
    window: int | None,
    needs_gradients: bool,
) -> tuple[Tensor, Tensor]:
    """The average of v, and what the backward pass needs. All tensors have the same precision."""
    out = empty_heads(q)
    saved = _empty_saved(q, window, needs_gradients)
    memory = SavedWeights(saved)
    length, width = q.shape[-2:]
    with torch.autocast(q.device.type, enabled=False):
        scaled_q = (q * width**-0.5).contiguous()
        k = k.contiguous()
        v = v.contiguous()
        tables = Tables(a, m, length, window, q)
        for block in find_blocks(len(q), length, starts, window):
            scores = grouped_product(block.queries(scaled_q), block.keys(k).mT)
            logits = tables.to_logits(scores, block, starts)
            if memory.has_weights:
                weights = memory.next_weights(logits.shape)
                torch.softmax(logits, -1, out=weights)
            else:
                weights = logits.softmax(-1)
            if memory.has_log_z:
                # The largest weight is exp(largest logit)/Z.
                block.queries(saved)[:] = logits.amax(-1) - weights.amax(-1).log()
            block.queries(out)[:] = grouped_product(weights, block.keys(v))
    return out, saved


@torch.library.custom_op("anlit::blockwise_attention_backward", mutates_args=())
def blockwise_attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    m: Tensor | None,
    starts: Tensor | None,
    window: int | None,
    saved: Tensor,
    are_tables_learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, a and m. a's and m's are empty unless the tables are learned."""
    length, width = q.shape[-2:]
    memory = SavedWeights(saved)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    with torch.autocast(q.device.type, enabled=False):
        scaled_q = (q * width**-0.5).contiguous()
        k = k.contiguous()
        v = v.contiguous()
        d_out = d_out.contiguous()
        tables = Tables(a, m, length, window, q)
        dk = torch.zeros_like(k)
        dv = torch.zeros_like(v)
        d_gain = None
        d_bias = None
        if are_tables_learned and tables.gain is not None:
            d_gain = torch.zeros_like(tables.gain)
        if are_tables_learned and m is not None:
            d_bias = torch.zeros_like(tables.bias)
        for block in find_blocks(len(q), length, starts, window):
            queries = block.queries(scaled_q)
            keys = block.keys(k)
            d_block = block.queries(d_out)
            if memory.has_weights:
                weights = memory.next_weights((*queries.shape[:3], keys.shape[2]))
            else:
                logits = tables.to_logits(grouped_product(queries, keys.mT), block, starts)
                weights = logits.sub_(block.queries(saved)[..., None]).exp_()
            _add_transposed_product(block.keys(dv), weights, d_block)
            d_weights = grouped_product(d_block, block.keys(v).mT)
            d_logits = torch.ops.aten._softmax_backward_data.out(
                d_weights, weights, -1, q.dtype, grad_input=d_weights
            )
            if d_bias is not None:
                _add_sum(tables.corner(d_bias, block), d_logits)
            if d_gain is not None:
                _add_sum(tables.corner(d_gain, block), d_logits * grouped_product(queries, keys.mT))
            if tables.gain is not None:
                d_logits.mul_(tables.corner(tables.gain, block))
            torch.mul(grouped_product(d_logits, keys), width**-0.5, out=block.queries(dq))
            _add_transposed_product(block.keys(dk), d_logits, queries)
        da = _sum_by_distance(tables, d_gain, a, q)
        dm = _sum_by_distance(tables, d_bias, m, q)
    return dq, dk, dv, da, dm


def _add_transposed_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """total (B, G, K, D) += xᵀ y, summed over the heads of a group.

    x (B, H, N, K), y (B, H, N, D).
    """
    flat = total.view(-1, *total.shape[2:])
    # Views if G is H
    x = x.reshape(len(flat), -1, x.shape[-1])
    y = y.reshape(len(flat), -1, y.shape[-1])
    flat.baddbmm_(x.mT, y)


def _add_sum(total: Tensor, terms: Tensor) -> None:
    """total (H or 1, queries, keys) += terms (B, H, queries, keys), summed over the other axes."""
    total += terms.sum_to_size(total.shape)


def _sum_by_distance(
    tables: Tables, d_matrix: Tensor | None, table: Tensor | None, like: Tensor
) -> Tensor:
    """The gradient of a table. Empty if it is not learned."""
    if d_matrix is None or table is None:
        return like.new_zeros(0)
    return tables.sum_by_distance(d_matrix, table)


def _empty_saved(q: Tensor, window: int | None, needs_gradients: bool) -> Tensor:
    """Uninitialised memory for `SavedWeights`. Empty without `needs_gradients`."""
    if not needs_gradients:
        return q.new_empty(0)
    B, H, T, _ = q.shape
    n_weights = 0
    for block in find_blocks(1, T, None, window):
        n_weights += B * H * block.n_queries * block.n_keys
    return q.new_empty(n_weights) if n_weights <= LARGEST_SAVED else q.new_empty(B, H, T)


@blockwise_attention.register_fake
def _(q, k, v, a, m, starts, window, needs_gradients):
    return empty_heads(q), _empty_saved(q, window, needs_gradients)


@blockwise_attention_backward.register_fake
def _(d_out, q, k, v, a, m, starts, window, saved, are_tables_learned):
    gradients = []
    for x in (q, k, v):
        gradients.append(torch.empty_like(x, memory_format=torch.contiguous_format))
    for table in (a, m):
        is_learned = are_tables_learned and table is not None
        gradients.append(torch.empty_like(table) if is_learned else q.new_empty(0))
    return tuple(gradients)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.window, _ = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, d_out: Tensor, _: Tensor | None):
    *tensors, saved = ctx.saved_tensors
    needs_da, needs_dm = ctx.needs_input_grad[3:5]
    dq, dk, dv, da, dm = blockwise_attention_backward(
        d_out, *tensors, ctx.window, saved, needs_da or needs_dm
    )
    return dq, dk, dv, da if needs_da else None, dm if needs_dm else None, None, None, None


blockwise_attention.register_autograd(_backward, setup_context=_setup_context)
