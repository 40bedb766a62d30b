"""The backward kernel over blocks of queries: dq, δ, and the gradient of a learned coefficient.

The backward kernels recompute the weights from the logits and the saved lse. With P the weights, O
the output, δ_i = dO_i·O_i and dP = dO Vᵀ, the gradient of the logits is dL = P ∘ (dP − δ). Sums
have a fixed order and no atomics.
"""

import triton
import triton.language as tl

from anlit.nn.kernels.triton import tiles

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["n_rows"])
def backward_queries(
    # Tensors; tables, lines, far_start, tangents, starts and d_coefficient may be None
    q, k, v, tables, lines, far_start, tangents, starts, out, lse, d_out, delta, dq, d_coefficient,
    # Numbers; window may be None
    scale, n_rows, length, window,
    # Strides of batch, head and token
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, d_out_b, d_out_h, d_out_t, tables_h, lines_h,
    tangents_h,
    # Constants of the compiled kernel
    n_heads: tl.constexpr, group: tl.constexpr, width: tl.constexpr, width_padded: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, pairs: tl.constexpr, tangent_pairs: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """dq (B, T, H, D), and δ (B, H, T) for the other kernel.

    `tangents` is the derivative of the tables by a learned coefficient. With it, d_coefficient
    (B, H, blocks) gets the block's share of the coefficient's gradient, Σ dL·(q·k ∂gain + ∂bias).
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * block_m
    b, h = tiles.row_and_head(n_rows, n_heads)
    k += b * k_b + (h // group) * k_h
    v += b * v_b + (h // group) * v_h
    if tables is not None:
        tables += h * tables_h
    if tangents is not None:
        tangents += h * tangents_h
    if starts is not None:
        starts += b * length

    rows = first + tl.arange(0, block_m)
    firsts = tiles.first_seen(rows, starts, window, length)
    if lines is not None:
        lines += h * lines_h
        far_start += h * (lines_h > 0)
    begin, full_begin, far_end, full_end, end = tiles.ranges_of_keys(
        first, firsts, starts, window, lines, far_start, length, block_m, block_n
    )

    inside = rows < length
    offset = (b * length * n_heads + h) * width
    vector = (b * n_heads + h) * length
    q_tile = tiles.load_rows(
        q + b * q_b + h * q_h, first, q_t, length, width, width_padded, block_m
    )
    d_out += b * d_out_b + h * d_out_h
    d_out_tile = tiles.load_rows(d_out, first, d_out_t, length, width, width_padded, block_m)
    out_tile = tiles.load_rows(
        out + offset, first, n_heads * width, length, width, width_padded, block_m
    )
    delta_rows = tl.sum(out_tile.to(tl.float32) * d_out_tile.to(tl.float32), 1)
    tl.store(delta + vector + rows, delta_rows, mask=inside)
    lse_rows = tl.load(lse + vector + rows, mask=inside, other=float("inf"))

    dq_tile = tl.zeros([block_m, width_padded], tl.float32)
    learned = tl.zeros([block_m], tl.float32)
    if firsts is not None:
        # Keys at the begin of documents or window, with a mask
        dq_tile, learned = _add_keys(
            dq_tile, learned, q_tile, d_out_tile, lse_rows, delta_rows, k, v, tables, tangents,
            first, firsts, begin, full_begin, scale, length, k_t, v_t, width, width_padded, block_m,
            block_n, pairs, tangent_pairs, precision,
            masked=True, is_far=False,
        )  # fmt: skip
    if lines is not None:
        # Far keys, by lines
        dq_tile, learned = _add_keys(
            dq_tile, learned, q_tile, d_out_tile, lse_rows, delta_rows, k, v, lines, tangents,
            first, firsts, full_begin, far_end, scale, length, k_t, v_t, width, width_padded,
            block_m, block_n, pairs, tangent_pairs, precision,
            masked=False, is_far=True,
        )  # fmt: skip
    # Near keys, without a mask
    dq_tile, learned = _add_keys(
        dq_tile, learned, q_tile, d_out_tile, lse_rows, delta_rows, k, v, tables, tangents, first,
        firsts, far_end, full_end, scale, length, k_t, v_t, width, width_padded, block_m, block_n,
        pairs, tangent_pairs, precision,
        masked=False, is_far=False,
    )  # fmt: skip
    # Keys at the diagonal, with a mask
    dq_tile, learned = _add_keys(
        dq_tile, learned, q_tile, d_out_tile, lse_rows, delta_rows, k, v, tables, tangents, first,
        firsts, full_end, end, scale, length, k_t, v_t, width, width_padded, block_m, block_n,
        pairs, tangent_pairs, precision,
        masked=True, is_far=False,
    )  # fmt: skip
    dq_tile *= LN_2 if pairs else LN_2 * scale
    tiles.store_rows(
        dq + offset, dq_tile, first, n_heads * width, length, width, width_padded, block_m
    )
    if tangents is not None:
        index = (b * n_heads + h) * tl.num_programs(0) + tl.program_id(0)
        tl.store(d_coefficient + index, tl.sum(learned, 0) * LN_2)


@triton.jit
def _add_keys(
    # The gradients so far; `learned` is the coefficient's, by query
    dq_tile, learned,
    # The block's queries, and all keys and values
    q_tile, d_out_tile, lse_rows, delta_rows, k, v, tables, tangents, first, firsts, begin, end,
    scale, length, k_t, v_t,
    # Constants of the compiled kernel
    width: tl.constexpr, width_padded: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    pairs: tl.constexpr, tangent_pairs: tl.constexpr, precision: tl.constexpr,
    masked: tl.constexpr, is_far: tl.constexpr,
):  # fmt: skip
    """Add keys begin … end − 1 to dq of the block's queries.

    `tables` are the lines if the keys are far.
    """
    offsets_m = tl.arange(0, block_m)
    columns = tl.arange(0, block_n)
    steps = offsets_m.to(tl.float32)
    rows = first + offsets_m
    offsets = offsets_m[:, None] - columns[None, :] + (block_n - 1)
    if begin < end:  # otherwise ptxas lets each wgmma wait for the previous
        k += tl.cast(begin, tl.int64) * k_t
        v += tl.cast(begin, tl.int64) * v_t
        if is_far:
            tables += tiles.line_offset(first - begin, pairs)
        for key in tl.range(begin, end, block_n):
            keys = key + columns
            k_tile = tiles.load_tile(k, k_t, length - key, width, width_padded, block_n, masked)
            v_tile = tiles.load_tile(v, v_t, length - key, width, width_padded, block_n, masked)
            is_visible = None
            if masked:
                is_visible = tiles.visible(
                    rows[:, None], keys[None, :], None if firsts is None else firsts[:, None]
                )
            scores = tiles.product(q_tile, tl.trans(k_tile), None, precision)
            if is_far:
                gain_slope, bias_slope, gains, biases = tiles.line_at(tables, steps, scale, pairs)
                logits, gain = tiles.far_logits_of(
                    scores,
                    gain_slope,
                    bias_slope,
                    gains[:, None] if pairs else gains,
                    (biases - lse_rows)[:, None],
                    columns.to(tl.float32)[None, :],
                    pairs,
                )
                weights = tl.exp2(logits)
                tables -= tiles.line_offset(block_n, pairs)
            else:
                logits, gain = tiles.logits_of(
                    scores,
                    tables,
                    first - key - (block_n - 1),
                    offsets,
                    rows[:, None],
                    keys[None, :],
                    is_visible,
                    scale,
                    pairs,
                    masked,
                )
                weights = tl.exp2(logits - lse_rows[:, None])
            d_weights = tiles.product(d_out_tile, tl.trans(v_tile), None, precision)
            d_scores = weights * (d_weights - delta_rows[:, None])
            if tangents is not None:
                d_gain, change = tiles.look_up(
                    tangents,
                    first - key - (block_n - 1),
                    offsets,
                    rows[:, None],
                    keys[None, :],
                    scale,
                    tangent_pairs,
                    masked,
                )
                if tangent_pairs:
                    change += d_gain * scores
                learned += tl.sum(d_scores * change, 1)
            if pairs:
                d_scores *= gain
            dq_tile = tiles.product(d_scores.to(k_tile.dtype), k_tile, dq_tile, precision)
            k += block_n * k_t
            v += block_n * v_t
    return dq_tile, learned
