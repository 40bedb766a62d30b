"""The forward kernel: a program per block of queries and head, a running softmax over its keys."""

import triton
import triton.language as tl

from anlit.nn.kernels.triton import tiles


@triton.jit(do_not_specialize=["n_rows"])
def forward(
    # Tensors; tables, lines, far_start and starts may be None
    q, k, v, tables, lines, far_start, starts, out, lse,
    # Numbers; window may be None
    scale, n_rows, length, window,
    # Strides of batch, head and token
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, tables_h, lines_h,
    # Constants of the compiled kernel
    n_heads: tl.constexpr, group: tl.constexpr, width: tl.constexpr, width_padded: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, pairs: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """out (B, T, H, D) and lse (B, H, T), in base 2, for the queries of one block and head.

    Only the first and the last blocks of keys need a mask. Far blocks between them take a(t) and
    m(t) from `lines`, near blocks from `tables`.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * block_m  # the longest rows start first
    b, h = tiles.row_and_head(n_rows, n_heads)
    k += b * k_b + (h // group) * k_h
    v += b * v_b + (h // group) * v_h
    if tables is not None:
        tables += h * tables_h
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

    q_tile = tiles.load_rows(
        q + b * q_b + h * q_h, first, q_t, length, width, width_padded, block_m
    )
    average = tl.zeros([block_m, width_padded], tl.float32)
    row_sum = tl.zeros([block_m], tl.float32)
    row_max = tl.full([block_m], float("-inf"), tl.float32)
    if firsts is not None:
        # Keys at the begin of documents or window, with a mask
        average, row_sum, row_max = _add_keys(
            average, row_sum, row_max, q_tile, k, v, tables, first, firsts, begin, full_begin,
            scale, length, k_t, v_t, width, width_padded, block_m, block_n, pairs, precision,
            masked=True, is_far=False,
        )  # fmt: skip
    if lines is not None:
        # Far keys, by lines
        average, row_sum, row_max = _add_keys(
            average, row_sum, row_max, q_tile, k, v, lines, first, firsts, full_begin, far_end,
            scale, length, k_t, v_t, width, width_padded, block_m, block_n, pairs, precision,
            masked=False, is_far=True,
        )  # fmt: skip
    # Near keys, without a mask
    average, row_sum, row_max = _add_keys(
        average, row_sum, row_max, q_tile, k, v, tables, first, firsts, far_end, full_end, scale,
        length, k_t, v_t, width, width_padded, block_m, block_n, pairs, precision,
        masked=False, is_far=False,
    )  # fmt: skip
    # Keys at the diagonal, with a mask
    average, row_sum, row_max = _add_keys(
        average, row_sum, row_max, q_tile, k, v, tables, first, firsts, full_end, end, scale,
        length, k_t, v_t, width, width_padded, block_m, block_n, pairs, precision,
        masked=True, is_far=False,
    )  # fmt: skip

    out += (b * length * n_heads + h) * width
    tiles.store_rows(
        out,
        average / row_sum[:, None],
        first,
        n_heads * width,
        length,
        width,
        width_padded,
        block_m,
    )
    lse += (b * n_heads + h) * length
    tl.store(lse + rows, row_max + tl.log2(row_sum), mask=rows < length)


@triton.jit
def _add_keys(
    # The running softmax
    average, row_sum, row_max,
    # The block's queries, and all keys and values
    q_tile, k, v, tables, first, firsts, begin, end, scale, length, k_t, v_t,
    # Constants of the compiled kernel
    width: tl.constexpr, width_padded: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    pairs: tl.constexpr, precision: tl.constexpr, masked: tl.constexpr, is_far: tl.constexpr,
):  # fmt: skip
    """Add keys begin … end − 1 to the running softmax. `tables` are the lines if the keys are far.

    `row_max` is the largest logit, with far keys a number near to it. That suffices, because
    lse = row_max + log2(row_sum) for any row_max.
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
            scores = tiles.product(q_tile, tl.trans(k_tile), None, precision)
            is_visible = None
            if masked:
                is_visible = tiles.visible(
                    rows[:, None], keys[None, :], None if firsts is None else firsts[:, None]
                )
            if is_far:
                gain_slope, bias_slope, gains, biases = tiles.line_at(tables, steps, scale, pairs)
                new_max = tl.maximum(row_max, tl.max(scores, 1) * gains + biases)
                logits, _ = tiles.far_logits_of(
                    scores,
                    gain_slope,
                    bias_slope,
                    gains[:, None] if pairs else gains,
                    (biases - new_max)[:, None],
                    columns.to(tl.float32)[None, :],
                    pairs,
                )
                weights = tl.exp2(logits)
                shrink = tl.exp2(row_max - new_max)
            else:
                logits, _ = tiles.logits_of(
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
                new_max = tl.maximum(row_max, tl.max(logits, 1))
                base = new_max
                if masked:
                    # A row without a visible key so far
                    base = tl.where(new_max == float("-inf"), 0.0, new_max)
                weights = tl.exp2(logits - base[:, None])
                shrink = tl.exp2(row_max - base)
            row_sum = row_sum * shrink + tl.sum(weights, 1)
            v_tile = tiles.load_tile(v, v_t, length - key, width, width_padded, block_n, masked)
            average = tiles.product(
                weights.to(v_tile.dtype), v_tile, average * shrink[:, None], precision
            )
            row_max = new_max
            k += block_n * k_t
            v += block_n * v_t
            if is_far:
                tables -= tiles.line_offset(block_n, pairs)
    return average, row_sum, row_max
