"""The backward kernel over blocks of queries: dq, and δ for the other kernels.

The backward kernels recompute the weights from the logits and the saved lse. With P the weights, O the output,
δ_i = dO_i·O_i and dP = dO Vᵀ, the gradient of the logits is dL = P ∘ (dP − δ). Sums have a fixed order and no
atomics.
"""

import triton
import triton.language as tl

from anlit.attention.backends.triton.tiles import first_seen, load_rows, logits_of, product, store_rows, visible

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def backward_queries(
    q,
    k,
    v,
    tables,
    starts,
    out,
    lse,
    d_out,
    delta,
    dq,
    scale,
    length,
    window,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    d_out_b,
    d_out_h,
    d_out_t,
    tables_h,
    n_heads: tl.constexpr,
    group: tl.constexpr,
    width: tl.constexpr,
    width_padded: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    pairs: tl.constexpr,
    precision: tl.constexpr,
):
    """dq (B, T, H, D), and δ (B, H, T) for the other kernels. It reads the same keys as the forward kernel."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * block_m
    b = (tl.program_id(1) // n_heads).to(tl.int64)
    h = (tl.program_id(1) % n_heads).to(tl.int64)
    k += b * k_b + (h // group) * k_h
    v += b * v_b + (h // group) * v_h
    if tables is not None:
        tables += h * tables_h
    if starts is not None:
        starts += b * length

    rows = first + tl.arange(0, block_m)
    firsts = first_seen(rows, starts, window, length)
    end = tl.minimum(first + block_m, length)
    full_end = (first + 1) // block_n * block_n
    if firsts is not None:
        begin = first_seen(first, starts, window, length) // block_n * block_n
        full_begin = tl.cdiv(first_seen(end - 1, starts, window, length), block_n) * block_n
        full_begin = tl.minimum(full_begin, full_end)
    else:
        begin = 0
        full_begin = 0

    inside = rows < length
    offset = (b * length * n_heads + h) * width
    vector = (b * n_heads + h) * length
    q_tile = load_rows(q + b * q_b + h * q_h, first, q_t, length, width, width_padded, block_m, True)
    d_out += b * d_out_b + h * d_out_h
    d_out_tile = load_rows(d_out, first, d_out_t, length, width, width_padded, block_m, True)
    out_tile = load_rows(out + offset, first, n_heads * width, length, width, width_padded, block_m, True)
    delta_rows = tl.sum(out_tile.to(tl.float32) * d_out_tile.to(tl.float32), 1)
    tl.store(delta + vector + rows, delta_rows, mask=inside)
    lse_rows = tl.load(lse + vector + rows, mask=inside, other=float("inf"))

    dq_tile = tl.zeros([block_m, width_padded], tl.float32)
    if firsts is not None:
        dq_tile = _over_keys(
            dq_tile, q_tile, d_out_tile, lse_rows, delta_rows, k, v, tables, first, firsts, begin, full_begin,
            scale, length, k_t, v_t, width, width_padded, block_m, block_n, pairs, precision, True,
        )  # fmt: skip
    dq_tile = _over_keys(
        dq_tile, q_tile, d_out_tile, lse_rows, delta_rows, k, v, tables, first, firsts, full_begin, full_end,
        scale, length, k_t, v_t, width, width_padded, block_m, block_n, pairs, precision, False,
    )  # fmt: skip
    dq_tile = _over_keys(
        dq_tile, q_tile, d_out_tile, lse_rows, delta_rows, k, v, tables, first, firsts, full_end, end,
        scale, length, k_t, v_t, width, width_padded, block_m, block_n, pairs, precision, True,
    )  # fmt: skip
    dq_tile *= LN_2 if pairs else LN_2 * scale
    store_rows(dq + offset, dq_tile, first, n_heads * width, length, width, width_padded, block_m)


@triton.jit
def _over_keys(
    dq_tile,
    q_tile,
    d_out_tile,
    lse_rows,
    delta_rows,
    k,
    v,
    tables,
    first,
    firsts,
    begin,
    end,
    scale,
    length,
    k_t,
    v_t,
    width: tl.constexpr,
    width_padded: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    pairs: tl.constexpr,
    precision: tl.constexpr,
    masked: tl.constexpr,
):
    """Add keys begin … end − 1 to dq of the block's queries."""
    offsets_m = tl.arange(0, block_m)
    columns = tl.arange(0, block_n)
    rows = first + offsets_m
    offsets = offsets_m[:, None] - columns[None, :] + (block_n - 1)
    for key in tl.range(begin, end, block_n):
        keys = key + columns
        k_tile = load_rows(k, key, k_t, length, width, width_padded, block_n, masked)
        v_tile = load_rows(v, key, v_t, length, width, width_padded, block_n, masked)
        seen = None
        if masked:
            seen = visible(rows[:, None], keys[None, :], None if firsts is None else firsts[:, None])
        scores = product(q_tile, tl.trans(k_tile), None, precision)
        logits, gain = logits_of(
            scores, tables, first - key - (block_n - 1), offsets, rows[:, None], keys[None, :], seen, scale,
            pairs, masked,
        )  # fmt: skip
        weights = tl.exp2(logits - lse_rows[:, None])
        d_weights = product(d_out_tile, tl.trans(v_tile), None, precision)
        d_scores = weights * (d_weights - delta_rows[:, None])
        if pairs:
            d_scores *= gain
        dq_tile = product(d_scores.to(k_tile.dtype), k_tile, dq_tile, precision)
    return dq_tile
