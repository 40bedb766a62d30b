"""The backward kernel over blocks of keys: dk and dv. The formulas are in `backward_queries.py`."""

import triton
import triton.language as tl

from anlit.nn.kernels.triton import tiles
from anlit.nn.kernels.triton.backward_queries import LN_2


@triton.jit(do_not_specialize=["n_rows"])
def backward_keys(
    # Tensors; tables, lines, far_start, starts and ends may be None
    q, k, v, tables, lines, far_start, starts, ends, lse, d_out, delta, dk, dv,
    # Numbers; window may be None
    scale, n_rows, length, window,
    # Strides of batch, head and token
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, d_out_b, d_out_h, d_out_t, tables_h, lines_h,
    # Constants of the compiled kernel
    n_heads: tl.constexpr, group: tl.constexpr, width: tl.constexpr, width_padded: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, pairs: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """dk and dv (B, T, H, D) of one block of keys, from one query head.

    The launch sums them over the query heads that share a key head.
    """
    first = tl.program_id(0) * block_n
    b, h = tiles.row_and_head(n_rows, n_heads)
    k += b * k_b + (h // group) * k_h
    v += b * v_b + (h // group) * v_h
    q += b * q_b + h * q_h
    d_out += b * d_out_b + h * d_out_h
    lse += (b * n_heads + h) * length
    delta += (b * n_heads + h) * length
    if tables is not None:
        tables += h * tables_h
    if starts is not None:
        starts += b * length
        ends += b * length

    last = tl.minimum(first + block_n, length) - 1
    begin = first // block_m * block_m
    end = _end_of_queries(last, ends, window, length)
    full_begin = tl.cdiv(first + block_n - 1, block_m) * block_m
    if starts is not None or window is not None:
        full_end = _end_of_queries(first, ends, window, length) // block_m * block_m
        full_end = tl.maximum(full_end, full_begin)
    else:
        full_end = end
    full_begin = tl.minimum(full_begin, end)
    full_end = tl.minimum(full_end, end)

    far_begin = full_end
    if lines is not None:
        lines += h * lines_h
        far_begin = tl.cdiv(first + tl.load(far_start + h * (lines_h > 0)), block_m) * block_m
        far_begin = tl.minimum(tl.maximum(far_begin, full_begin), full_end)

    k_tile = tiles.load_rows(k, first, k_t, length, width, width_padded, block_n)
    v_tile = tiles.load_rows(v, first, v_t, length, width, width_padded, block_n)
    dk_tile = tl.zeros([block_n, width_padded], tl.float32)
    dv_tile = tl.zeros([block_n, width_padded], tl.float32)
    # Queries at the diagonal, with a mask
    dk_tile, dv_tile = _add_queries(
        dk_tile, dv_tile, k_tile, v_tile, q, d_out, lse, delta, tables, first, starts, window,
        begin, full_begin, scale, length, q_t, d_out_t, width, width_padded, block_m, block_n,
        pairs, precision,
        masked=True, is_far=False,
    )  # fmt: skip
    # Near queries, without a mask
    dk_tile, dv_tile = _add_queries(
        dk_tile, dv_tile, k_tile, v_tile, q, d_out, lse, delta, tables, first, starts, window,
        full_begin, far_begin, scale, length, q_t, d_out_t, width, width_padded, block_m, block_n,
        pairs, precision,
        masked=False, is_far=False,
    )  # fmt: skip
    if lines is not None:
        # Far queries, by lines
        dk_tile, dv_tile = _add_queries(
            dk_tile, dv_tile, k_tile, v_tile, q, d_out, lse, delta, lines, first, starts, window,
            far_begin, full_end, scale, length, q_t, d_out_t, width, width_padded, block_m, block_n,
            pairs, precision,
            masked=False, is_far=True,
        )  # fmt: skip
    if starts is not None or window is not None:
        # Queries at the end of documents or window, with a mask
        dk_tile, dv_tile = _add_queries(
            dk_tile, dv_tile, k_tile, v_tile, q, d_out, lse, delta, tables, first, starts, window,
            full_end, end, scale, length, q_t, d_out_t, width, width_padded, block_m, block_n,
            pairs, precision,
            masked=True, is_far=False,
        )  # fmt: skip

    dk_tile *= LN_2 if pairs else LN_2 * scale
    offset = (b * length * n_heads + h) * width
    tiles.store_rows(
        dk + offset, dk_tile, first, n_heads * width, length, width, width_padded, block_n
    )
    tiles.store_rows(
        dv + offset, dv_tile, first, n_heads * width, length, width, width_padded, block_n
    )


@triton.jit
def _end_of_queries(key, ends, window, length):
    """The number after the last query that sees `key`."""
    end = length
    if ends is not None:
        end = tl.load(ends + key)
    if window is not None:
        end = tl.minimum(end, key + window)
    return end


@triton.jit
def _add_queries(
    # The gradients so far
    dk_tile, dv_tile,
    # The block's keys and values, and all queries
    k_tile, v_tile, q, d_out, lse, delta, tables, first, starts, window, begin, end, scale, length,
    q_t, d_out_t,
    # Constants of the compiled kernel
    width: tl.constexpr, width_padded: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    pairs: tl.constexpr, precision: tl.constexpr, masked: tl.constexpr, is_far: tl.constexpr,
):  # fmt: skip
    """Add queries begin … end − 1 to dk and dv of the block's keys.

    `tables` are the lines if the queries are far.
    """
    offsets_m = tl.arange(0, block_m)
    columns = tl.arange(0, block_n)
    steps = offsets_m.to(tl.float32)
    keys = first + columns
    offsets = offsets_m[None, :] - columns[:, None] + (block_n - 1)
    if begin < end:  # otherwise ptxas lets each wgmma wait for the previous
        q += tl.cast(begin, tl.int64) * q_t
        d_out += tl.cast(begin, tl.int64) * d_out_t
        if is_far:
            tables += tiles.line_offset(begin - first, pairs)
        for row in tl.range(begin, end, block_m):
            rows = row + offsets_m
            inside = rows < length
            q_tile = tiles.load_tile(q, q_t, length - row, width, width_padded, block_m, True)
            d_out_tile = tiles.load_tile(
                d_out, d_out_t, length - row, width, width_padded, block_m, True
            )
            # No weight for rows past the end
            lse_rows = tl.load(lse + rows, mask=inside, other=float("inf"))
            delta_rows = tl.load(delta + rows, mask=inside, other=0.0)
            is_visible = None
            if masked:
                firsts = tiles.first_seen(rows, starts, window, length)
                is_visible = tiles.visible(
                    rows[None, :], keys[:, None], None if firsts is None else firsts[None, :]
                )
            scores = tiles.product(k_tile, tl.trans(q_tile), None, precision)
            if is_far:
                gain_slope, bias_slope, gains, biases = tiles.line_at(tables, steps, scale, pairs)
                logits, gain = tiles.far_logits_of(
                    scores,
                    gain_slope,
                    bias_slope,
                    gains[None, :] if pairs else gains,
                    (biases - lse_rows)[None, :],
                    columns.to(tl.float32)[:, None],
                    pairs,
                )
                weights = tl.exp2(logits)
                tables += tiles.line_offset(block_m, pairs)
            else:
                logits, gain = tiles.logits_of(
                    scores,
                    tables,
                    row - first - (block_n - 1),
                    offsets,
                    rows[None, :],
                    keys[:, None],
                    is_visible,
                    scale,
                    pairs,
                    masked,
                )
                weights = tl.exp2(logits - lse_rows[None, :])
            dv_tile = tiles.product(weights.to(d_out_tile.dtype), d_out_tile, dv_tile, precision)
            d_weights = tiles.product(v_tile, tl.trans(d_out_tile), None, precision)
            d_scores = weights * (d_weights - delta_rows[None, :])
            if pairs:
                d_scores *= gain
            dk_tile = tiles.product(d_scores.to(q_tile.dtype), q_tile, dk_tile, precision)
            q += block_m * q_t
            d_out += block_m * d_out_t
    return dk_tile, dv_tile
