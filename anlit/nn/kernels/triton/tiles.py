"""Functions that the kernels share: visible keys, tiles of tensors, and the tables over distance.

The logits of attention are L = a(t)·S + m(t), with S = q·k/√D and the distance t from query to key.
Here they are in base 2, where an exponential is a single instruction:
log2(e)·L = gain·(q·k) + bias, with gain = a(t)·log2(e)/√D and bias = m(t)·log2(e).

Arguments, by their names in all kernels. A None compiles to no code:

    rows, keys            numbers of queries and keys, in shapes that broadcast to the tile.
    scores                q·k of the tile.
    starts                the first key of each query's document, (T,); None without documents.
    firsts                the first key that each query sees; None if it sees all before it.
    window                keys that a query sees at most; None for no limit.
    tables                gain and bias at each distance, of one head, see `make_tables`.
    lines, far_start      straight lines instead, and where they begin, see `linear_tables`.
    scale                 log2(e)/√D, the gain of mechanisms without a(t).

Constants of the compiled kernels:

    block_m, block_n      queries and keys in a tile.
    width, width_padded   D, and the power of two in which a tile holds it.
    group                 query heads that share a key head.
    pairs                 tables hold (gain, bias); otherwise biases alone.
    masked                the tile needs a mask.
    is_far                the tile takes gain and bias from lines.
    bounded               the tile may reach past the sequence.
"""

import os

import torch
import triton
import triton.language as tl

from anlit.nn.kernels.triton.tables import LINE_SPACING

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
SPACING = tl.constexpr(LINE_SPACING)
"""`LINE_SPACING`, for kernels: tokens from each line to the next."""

PTX = tl.constexpr(not INTERPRETED.value and torch.version.hip is None)
"""Whether kernels may contain PTX, the assembly of NVIDIA's GPUs."""


@triton.jit
def row_and_head(n_rows, n_heads: tl.constexpr):
    """This program's row and head, int64 for products with strides.

    The launch splits the number row·H + head over two axes of the grid, see `operator.py`. There
    may be a few programs too many. They compute the last head once more, to the same bits.
    """
    number = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    number = tl.minimum(number, n_rows * n_heads - 1)
    return (number // n_heads).to(tl.int64), (number % n_heads).to(tl.int64)


@triton.jit
def first_seen(rows, starts, window, length):
    """The first key that each query of `rows` sees, in its document and window.

    None without documents and window.
    """
    if starts is not None:
        firsts = tl.load(starts + tl.minimum(rows, length - 1))
        if window is not None:
            firsts = tl.maximum(firsts, rows - window + 1)
    elif window is not None:
        firsts = tl.maximum(rows - window + 1, 0)
    else:
        firsts = None
    return firsts


@triton.jit
def visible(rows, keys, firsts):
    """Whether queries `rows` see `keys`, both of shapes that broadcast."""
    is_visible = keys <= rows
    if firsts is not None:
        is_visible = is_visible & (keys >= firsts)
    return is_visible


@triton.jit
def load_rows(
    tensor,
    first,
    stride,
    length,
    width: tl.constexpr,
    width_padded: tl.constexpr,
    block: tl.constexpr,
):
    """Rows from `first` on of (T, D) as (block, width_padded): 0 past the width and past T."""
    rows = tensor + tl.cast(first, tl.int64) * stride
    return load_tile(rows, stride, length - first, width, width_padded, block, True)


@triton.jit
def load_tile(
    tensor, stride, length,
    width: tl.constexpr, width_padded: tl.constexpr, block: tl.constexpr, bounded: tl.constexpr,
):  # fmt: skip
    """The first rows of (length, D) as (block, width_padded): 0 past the width and, if bounded,
    past the length.
    """
    rows = tl.arange(0, block)
    columns = tl.arange(0, width_padded)
    pointers = tensor + (rows[:, None] * stride + columns[None, :])
    if bounded and width != width_padded:
        inside = (rows < length)[:, None] & (columns < width)[None, :]
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif bounded:
        tile = tl.load(pointers, mask=(rows < length)[:, None], other=0.0)
    elif width != width_padded:
        tile = tl.load(pointers, mask=(columns < width)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_rows(
    tensor, tile, first, stride, length,
    width: tl.constexpr, width_padded: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_rows`, bounded, in the dtype of `tensor`."""
    rows = tl.arange(0, block)
    columns = tl.arange(0, width_padded)
    pointers = (
        tensor + tl.cast(first, tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    )
    inside = (first + rows < length)[:, None] & (columns < width)[None, :]
    tl.store(pointers, tile.to(tensor.dtype.element_ty), mask=inside)


@triton.jit
def product(a, b, start, precision: tl.constexpr):
    """start + a b in float32; a `start` of None is 0."""
    if INTERPRETED:  # the interpreter's product has no bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, start, input_precision=precision)


@triton.jit
def logits_of(
    scores,
    tables,
    least,
    offsets,
    rows,
    keys,
    is_visible,
    scale,
    pairs: tl.constexpr,
    masked: tl.constexpr,
):
    """log2(e)·L of a tile, −∞ for pairs that are not visible, and the gain of the scores."""
    if tables is None:
        gain = scale
        logits = scores * gain
    else:
        gain, bias = look_up(tables, least, offsets, rows, keys, scale, pairs, masked)
        logits = tl.fma(scores, tl.broadcast_to(gain, scores.shape), bias)
    if masked:
        logits = tl.where(is_visible, logits, float("-inf"))
    return logits, gain


@triton.jit
def ranges_of_keys(
    first,
    firsts,
    starts,
    window,
    lines,
    far_start,
    length,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """The keys that the queries from `first` on see: begin, full_begin, far_end, full_end, end.

    Blocks from begin to full_begin and from full_end to end need a mask. Tiles from full_begin to
    far_end are far.
    """
    end = tl.minimum(first + block_m, length)
    full_end = (first + 1) // block_n * block_n
    if firsts is not None:
        begin = first_seen(first, starts, window, length) // block_n * block_n
        full_begin = tl.cdiv(first_seen(end - 1, starts, window, length), block_n) * block_n
        full_begin = tl.minimum(full_begin, full_end)
    else:
        begin = 0
        full_begin = 0
    far_end = full_begin
    if lines is not None:
        far_end = tl.maximum(first - tl.load(far_start) + block_n, 0) // block_n * block_n
        far_end = tl.minimum(tl.maximum(far_end, full_begin), full_end)
    return begin, full_begin, far_end, full_end, end


@triton.jit
def line_offset(distance, pairs: tl.constexpr):
    """The offset in `lines` for a tile with `distance` between its first query and first key.

    A line has slope and level of the gain, only with pairs, and then of the bias.
    """
    numbers_per_line: tl.constexpr = 4 if pairs else 2
    return distance // SPACING * numbers_per_line


@triton.jit
def line_at(lines, steps, scale, pairs: tl.constexpr):
    """The slopes of gain and bias over distance in a far tile, and both at queries and first key.

    `steps` counts the queries from the tile's first, as floats. See `tables.py`.
    """
    gain_slope, gain, bias_slope, bias = _load_line(lines, pairs)
    gains = gain_slope * steps + gain if pairs else scale
    return gain_slope, bias_slope, gains, bias_slope * steps + bias


@triton.jit
def far_logits_of(scores, gain_slope, bias_slope, gains, biases, keys, pairs: tl.constexpr):
    """log2(e)·L of a far tile, and the gain of the scores.

    `keys` counts from the tile's first, as floats.
    """
    if pairs:
        gains = _falling(gain_slope, gains, keys, scores)
    else:
        gains = tl.broadcast_to(gains, scores.shape)
    return tl.fma(scores, gains, _falling(bias_slope, biases, keys, scores)), gains


@triton.jit
def _falling(slope, first, keys, like):
    """first − slope·keys in the shape of `like`, as one instruction."""
    slope = tl.broadcast_to(-slope, like.shape)
    return tl.fma(slope, tl.broadcast_to(keys, like.shape), tl.broadcast_to(first, like.shape))


@triton.jit
def _load_line(lines, pairs: tl.constexpr):
    """Slope and level of the gains, then of the biases. The gains' are 0 without pairs.

    See `_load_pairs`.
    """
    if PTX and pairs:
        gain_slope, gain, slope, bias = tl.inline_asm_elementwise(
            "ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];",
            "=f,=f,=f,=f,l",
            [lines.to(tl.uint64)],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    elif pairs:
        gain_slope = tl.load(lines)
        gain = tl.load(lines + 1)
        slope = tl.load(lines + 2)
        bias = tl.load(lines + 3)
    else:
        gain_slope = 0.0
        gain = 0.0
        slope, bias = _load_pairs(lines, 0)
    return gain_slope, gain, slope, bias


@triton.jit
def look_up(tables, least, offsets, rows, keys, scale, pairs: tl.constexpr, masked: tl.constexpr):
    """Gain and bias of the pairs (rows, keys), of shapes that broadcast.

    Unless masked, rows − keys is least + offsets, with the same offsets ≥ 0 for all tiles. A thread
    computes them once, and an address per tile.
    """
    step: tl.constexpr = 2 if pairs else 1
    if masked:
        offsets = tl.maximum(rows - keys, 0)
    else:
        tables += tl.cast(least, tl.int64) * step
    if pairs:
        gain, bias = _load_pairs(tables, offsets)
    else:
        gain = scale
        bias = _load_singles(tables, offsets)
    return gain, bias


@triton.jit
def _load_pairs(tables, offsets):
    """The two numbers at each offset. In PTX a plain load for both.

    Triton would pipeline a `tl.load` inside a loop through shared memory, with a whole tile of
    numbers. Only one number per diagonal differs.
    """
    if PTX:
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .u64 address;
            cvt.u64.u32 address, $2;
            add.u64 address, address, $3;
            ld.global.nc.v2.f32 {$0, $1}, [address];
            }""",
            "=f,=f,r,l",
            [offsets * 8, tables.to(tl.uint64)],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        first = tl.load(tables + offsets * 2)
        second = tl.load(tables + offsets * 2 + 1)
    return first, second


@triton.jit
def _load_singles(tables, offsets):
    """The number at each offset. See `_load_pairs`."""
    if PTX:
        value = tl.inline_asm_elementwise(
            """{
            .reg .u64 address;
            cvt.u64.u32 address, $1;
            add.u64 address, address, $2;
            ld.global.nc.f32 $0, [address];
            }""",
            "=f,r,l",
            [offsets * 4, tables.to(tl.uint64)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        value = tl.load(tables + offsets)
    return value
