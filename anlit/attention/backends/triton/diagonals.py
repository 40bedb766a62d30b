"""The gradients of the two tables over distance: sums of the logits' gradient along diagonals, in a fixed order."""

import triton
import triton.language as tl

from anlit.attention.backends.triton.backward_queries import LN_2
from anlit.attention.backends.triton.tiles import first_seen, load_rows, look_up, product, visible


@triton.jit
def backward_tables(
    q,
    k,
    v,
    tables,
    starts,
    lse,
    d_out,
    delta,
    d_tables,
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
    block: tl.constexpr,
    pairs: tl.constexpr,
    precision: tl.constexpr,
):
    """Σ dL and, for pairs, Σ dL·(q·k) over the query-key pairs at each distance: (B, H, 1 or 2, 2, blocks·block).

    A program has the square tiles whose query block is `apart` blocks after their key block. Entry (x, y) has the same
    distance in all of them, apart·block + x − y. So the tiles are added first, and the sum is taken along diagonals.
    Entries with x ≥ y go to the first of the 2 parts, at their distance; those with x < y to the second, one block
    further on.
    """
    apart = tl.program_id(0)
    b = (tl.program_id(1) // n_heads).to(tl.int64)
    h = (tl.program_id(1) % n_heads).to(tl.int64)
    q += b * q_b + h * q_h
    k += b * k_b + (h // group) * k_h
    v += b * v_b + (h // group) * v_h
    d_out += b * d_out_b + h * d_out_h
    lse += (b * n_heads + h) * length
    delta += (b * n_heads + h) * length
    if starts is not None:
        starts += b * length
    steps = tl.arange(0, block)
    if tables is not None:
        tables += h * tables_h
    gain, bias = look_up(tables, 0, None, apart * block + steps[:, None], steps[None, :], scale, pairs, True)

    sum_gains = tl.zeros([block, block], tl.float32)
    sum_biases = tl.zeros([block, block], tl.float32)
    begin = apart * block
    if window is not None:
        begin = tl.where(begin - block + 1 >= window, length, begin)  # these tiles are outside the window
    for row in tl.range(begin, length, block):
        key = row - apart * block
        if _reaches(row, key + block, starts):
            rows = row + steps
            inside = rows < length
            q_tile = load_rows(q, row, q_t, length, width, width_padded, block, True)
            d_out_tile = load_rows(d_out, row, d_out_t, length, width, width_padded, block, True)
            k_tile = load_rows(k, key, k_t, length, width, width_padded, block, True)
            v_tile = load_rows(v, key, v_t, length, width, width_padded, block, True)
            lse_rows = tl.load(lse + rows, mask=inside, other=float("inf"))
            delta_rows = tl.load(delta + rows, mask=inside, other=0.0)
            firsts = first_seen(rows, starts, window, length)
            seen = visible(rows[:, None], key + steps[None, :], None if firsts is None else firsts[:, None])
            seen = seen & inside[:, None]
            scores = product(q_tile, tl.trans(k_tile), None, precision)
            logits = tl.where(seen, scores * gain + bias, float("-inf"))
            weights = tl.exp2(logits - lse_rows[:, None])
            d_weights = product(d_out_tile, tl.trans(v_tile), None, precision)
            d_logits = weights * (d_weights - delta_rows[:, None])
            if pairs:
                sum_gains += d_logits * scores
            sum_biases += d_logits

    d_tables += (b * n_heads + h) * (4 if pairs else 2) * tl.num_programs(0) * block
    _store_diagonals(d_tables, sum_biases, apart, steps, block)
    if pairs:
        _store_diagonals(d_tables + 2 * tl.num_programs(0) * block, sum_gains, apart, steps, block)


@triton.jit
def _reaches(row, key_end, starts):
    """Whether a block of queries from `row` sees any key before `key_end`; its first query sees the furthest."""
    reaches = row >= 0
    if starts is not None:
        reaches = tl.load(starts + row) < key_end
    return reaches


@triton.jit
def _store_diagonals(parts, tile, apart, steps, block: tl.constexpr):
    """Store the tile's sums along diagonals. Rolling row x by x turns each diagonal into a column of one part."""
    rolled = tl.gather(tile, (steps[:, None] - steps[None, :] + block) % block, 1)
    at_or_after = steps[:, None] >= steps[None, :]
    parts += apart * block + steps
    tl.store(parts, tl.sum(tl.where(at_or_after, rolled, 0.0), 0) * LN_2)
    tl.store(parts + tl.num_programs(0) * block, tl.sum(tl.where(at_or_after, 0.0, rolled), 0) * LN_2)
