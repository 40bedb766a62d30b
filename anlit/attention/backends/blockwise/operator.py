"""The kernel as custom operators: opaque to `torch.compile`, known to autograd and the FLOP counter.

    anlit::blockwise_attention(q, k, v, a, m, starts, window, keeps, n_shares) -> (out, kept)

q and out are (B, H, T, D), k and v (B, G, T, D), see `anlit.attention.groups`. a and m are tables over distance, (T,)
or (H or 1, T), or None if trivial. `starts`, (B, T), is where the document of each token begins; None for one document.
A query sees the keys from there to its own, and at most `window` of them. The sequences, or the groups of heads if
there are few sequences, are divided among `n_shares` threads.
"""

import math
from functools import partial

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from anlit.attention.backends.blockwise import workers
from anlit.attention.backends.blockwise.blocks import QUERIES, Block, Share, Tables, blocks, shares

KEPT_WEIGHTS = 2**22
"""The largest number of attention weights of a layer that are kept for the backward pass (16 MB in float32). If there
are more, the backward pass recomputes them from the logits' log-sum-exp."""


@torch.library.custom_op("anlit::blockwise_attention", mutates_args=())
def blockwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    m: Tensor | None,
    starts: Tensor | None,
    window: int | None,
    keeps: bool,
    n_shares: int,
) -> tuple[Tensor, Tensor]:
    """The average of v and, if `keeps`, what the backward pass needs, see `_kept`. All tensors have one precision."""
    out, kept = _outputs(q), _kept(q, window, keeps)

    def compute(share: Share, part: Tensor) -> None:
        share_a, share_m = (None if table is None else share.of_table(table) for table in (a, m))
        inputs = share.of(q), share.of_keys(k), share.of_keys(v), share_a, share_m, share.of_starts(starts)
        _forward(*inputs, window, share.of(out), part)

    with torch.autocast(q.device.type, enabled=False):
        workers.run([partial(compute, *shared) for shared in _shared(q, k, kept, n_shares)])
    return out, kept


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    m: Tensor | None,
    starts: Tensor | None,
    window: int | None,
    out: Tensor,
    kept: Tensor,
) -> None:
    """Compute one share, into `out` and `kept`."""
    length, width = q.shape[-2:]
    rows, k, v = (q * width**-0.5).contiguous(), k.contiguous(), v.contiguous()
    tables = Tables(a, m, length, window, q)
    for block, offset in _blocks_with_offsets(q, starts, window):
        logits = tables.to_logits(_product(block.queries(rows), block.keys(k).mT), block, starts)
        if kept.dim() == 1 and kept.numel():
            weights = kept[offset : offset + logits.numel()].view(logits.shape)
            torch.softmax(logits, -1, out=weights)
        else:
            weights = logits.softmax(-1)
        if kept.dim() == 3:  # log Z, because the largest weight is exp(largest logit)/Z
            block.queries(kept)[:] = logits.amax(-1) - weights.amax(-1).log()
        block.queries(out)[:] = _product(weights, block.keys(v))


@torch.library.custom_op("anlit::blockwise_attention_backward", mutates_args=())
def blockwise_attention_backward(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    m: Tensor | None,
    starts: Tensor | None,
    window: int | None,
    kept: Tensor,
    of_tables: bool,
    n_shares: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, a and m; those of a and m are empty without `of_tables`."""
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    dq, dk, dv = gradients
    parts = _shared(q, k, kept, n_shares)

    def compute(share: Share, part: Tensor) -> tuple[Tensor | None, Tensor | None]:
        share_a, share_m = (None if table is None else share.of_table(table) for table in (a, m))
        inputs = share.of(upstream), share.of(q), share.of_keys(k), share.of_keys(v)
        gradients_of = share.of(dq), share.of_keys(dk), share.of_keys(dv)
        tables = share_a, share_m, share.of_starts(starts)
        return _backward_share(*inputs, *tables, window, part, of_tables, *gradients_of)

    with torch.autocast(q.device.type, enabled=False):
        found = workers.run([partial(compute, *shared) for shared in parts])
    da, dm = (torch.zeros_like(t) if of_tables and t is not None else q.new_zeros(0) for t in (a, m))
    for (share, _), table_gradients in zip(parts, found, strict=True):
        for total, gradient in zip((da, dm), table_gradients, strict=True):
            if gradient is not None:
                share.of_table(total).add_(gradient)
    return dq, dk, dv, da, dm


def _backward_share(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    m: Tensor | None,
    starts: Tensor | None,
    window: int | None,
    kept: Tensor,
    of_tables: bool,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute one share: writes the gradients of q, k, v, and returns those of a and m."""
    length, width = q.shape[-2:]
    rows, k, v = (q * width**-0.5).contiguous(), k.contiguous(), v.contiguous()
    upstream = upstream.contiguous()
    tables = Tables(a, m, length, window, q)
    dk_sum, dv_sum = torch.zeros_like(k), torch.zeros_like(v)
    d_gain, d_bias = (_zeros_of_matrix(table, q) if of_tables else None for table in (a, m))
    for block, offset in _blocks_with_offsets(q, starts, window):
        queries, keys, gradient = block.queries(rows), block.keys(k), block.queries(upstream)
        if kept.dim() == 1:
            shape = (*queries.shape[:3], keys.shape[2])
            weights = kept[offset : offset + math.prod(shape)].view(shape)
        else:
            logits = tables.to_logits(_product(queries, keys.mT), block, starts)
            weights = logits.sub_(block.queries(kept)[..., None]).exp_()
        _add_transposed_product(block.keys(dv_sum), weights, gradient)
        d_weights = _product(gradient, block.keys(v).mT)
        d_logits = torch.ops.aten._softmax_backward_data.out(d_weights, weights, -1, q.dtype, grad_input=d_weights)
        if d_bias is not None:
            _add_to(tables.part(d_bias, block), d_logits)
        if d_gain is not None:
            _add_to(tables.part(d_gain, block), d_logits * _product(queries, keys.mT))
        if tables.gain is not None:
            d_logits.mul_(tables.part(tables.gain, block))
        torch.mul(_product(d_logits, keys), width**-0.5, out=block.queries(dq))
        _add_transposed_product(block.keys(dk_sum), d_logits, queries)
    dk.copy_(dk_sum)
    dv.copy_(dv_sum)
    da = tables.by_distance(d_gain, a) if d_gain is not None and a is not None else None
    dm = tables.by_distance(d_bias, m) if d_bias is not None and m is not None else None
    return da, dm


def _shared(q: Tensor, k: Tensor, kept: Tensor, n_shares: int) -> list[tuple[Share, Tensor]]:
    """The shares, each with its part of `kept`."""
    n_rows, n_heads = q.shape[:2]
    found, offset = [], 0
    for share in shares(n_rows, k.shape[1], n_shares, n_heads // k.shape[1]):
        size = kept.numel() // (n_rows * n_heads) * share.of(q[:, :, 0, 0]).numel()
        found.append((share, share.of(kept) if kept.dim() == 3 else kept[offset : offset + size]))
        offset += size
    return found


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x y for each head, x (B, H, M, N), y (B, G, N, K): the heads of a group are rows of one matrix."""
    return torch.bmm(_rows(x, y.shape[1]), y.flatten(0, 1)).view(*x.shape[:3], y.shape[3])


def _add_transposed_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """total (B, G, K, D) += xᵀ y, summed over the heads of a group; x (B, H, N, K), y (B, H, N, D)."""
    n_groups = total.shape[1]
    total.view(-1, *total.shape[2:]).baddbmm_(_rows(x, n_groups).mT, _rows(y, n_groups))


def _rows(x: Tensor, n_groups: int) -> Tensor:
    """(B, H, M, N) → (B·G, H/G·M, N), a view if G is H."""
    return x.reshape(len(x) * n_groups, -1, x.shape[-1])


def _blocks_with_offsets(q: Tensor, starts: Tensor | None, window: int | None) -> list[tuple[Block, int]]:
    """Every block with the offset of its weights in `kept`."""
    n_rows, n_heads, length, _ = q.shape
    found, offset = [], 0
    for block in blocks(n_rows, length, starts, window):
        found.append((block, offset))
        offset += (block.end_row - block.row) * n_heads * (block.end - block.first) * (block.end - block.begin)
    return found


def _outputs(q: Tensor) -> Tensor:
    """Uninitialised (B, H, T, D), in memory as (B, T, H, D), the layout that W_o reads."""
    B, H, T, D = q.shape
    return q.new_empty(B, T, H, D).transpose(1, 2)


def _kept(q: Tensor, window: int | None, keeps: bool) -> Tensor:
    """Memory for all weights, block after block; for log Z, (B, H, T), if they are too many; none without `keeps`.

    With documents part of it stays untouched.
    """
    B, H, T, _ = q.shape
    n_weights = sum((b.end - b.first) * (b.end - b.begin) for b in blocks(1, T, None, window)) * B * H
    if not keeps:
        return q.new_empty(0)
    return q.new_empty(n_weights) if n_weights <= KEPT_WEIGHTS else q.new_empty(B, H, T)


def _zeros_of_matrix(table: Tensor | None, q: Tensor) -> Tensor | None:
    """Zeros (H or 1, QUERIES, T), to sum the gradient of a table (T,) or (H or 1, T)."""
    if table is None:
        return None
    n_heads, length = table.numel() // q.shape[-2], q.shape[-2]
    return q.new_zeros(n_heads, QUERIES, length)


def _add_to(total: Tensor, gradient: Tensor) -> None:
    """total (H or 1, queries, keys) += gradient (sequences, H, queries, keys), summed over the missing axes."""
    total += gradient.sum(0) if len(total) > 1 else gradient.sum((0, 1))


@blockwise_attention.register_fake
def _(q, k, v, a, m, starts, window, keeps, n_shares):
    return _outputs(q), _kept(q, window, keeps)


@blockwise_attention_backward.register_fake
def _(upstream, q, k, v, a, m, starts, window, kept, of_tables, n_shares):
    tables = (torch.empty_like(t) if of_tables and t is not None else q.new_empty(0) for t in (a, m))
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)) + tuple(tables)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, window, _, n_shares = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.window, ctx.n_shares = window, n_shares
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, upstream: Tensor, _: Tensor | None):
    *tensors, kept = ctx.saved_tensors
    wants_a, wants_m = ctx.needs_input_grad[3:5]
    of_tables = wants_a or wants_m
    dq, dk, dv, da, dm = blockwise_attention_backward(upstream, *tensors, ctx.window, kept, of_tables, ctx.n_shares)
    return dq, dk, dv, da if wants_a else None, dm if wants_m else None, None, None, None, None


blockwise_attention.register_autograd(_backward, setup_context=_setup_context)


def _flops(q_shape, window: int | None, products: int) -> int:
    """FLOPs of `products` matrix products over the visible pairs, for sequences of one document, as for Triton."""
    B, H, T, D = q_shape
    seen = T if window is None else min(window, T)
    return 2 * products * D * B * H * (T * seen - math.comb(seen, 2))


@register_flop_formula(torch.ops.anlit.blockwise_attention)
def _forward_flops(q_shape, k_shape, v_shape, a_shape, m_shape, starts_shape, window, *_, **__) -> int:
    return _flops(q_shape, window, 2)


@register_flop_formula(torch.ops.anlit.blockwise_attention_backward)
def _backward_flops(d_out_shape, q_shape, k_shape, v_shape, a, m, starts, window, *_, **__) -> int:
    return _flops(q_shape, window, 4)
