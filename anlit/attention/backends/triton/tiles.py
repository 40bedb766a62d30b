"""What the kernels share: which keys a query sees, tiles of the tensors, and the two tables over distance.

Logits are in base 2: log2(e)·L = gain·(q·k) + bias, where gain = a(t)·log2(e)/√D and bias = m(t)·log2(e) come ready
made, so an exponential is one instruction. A table that is None, and `firsts` that is None, cost nothing.
"""

import triton
import triton.language as tl


@triton.jit
def first_seen(rows, starts, window, length):
    """The first key that each query of `rows` sees: of its document, inside the window. None where that is key 0."""
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
    seen = keys <= rows
    if firsts is not None:
        seen = seen & (keys >= firsts)
    return seen


@triton.jit
def load_rows(
    tensor,
    first,
    stride,
    length,
    width: tl.constexpr,
    width_padded: tl.constexpr,
    block: tl.constexpr,
    bounded: tl.constexpr,
):
    """Rows first … first + block − 1 of (T, D) as (block, width_padded), zeros past the width and, if bounded, past T."""
    rows = tl.arange(0, block)
    columns = tl.arange(0, width_padded)
    pointers = tensor + tl.cast(first, tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    if bounded and width != width_padded:
        tile = tl.load(pointers, mask=(first + rows < length)[:, None] & (columns < width)[None, :], other=0.0)
    elif bounded:
        tile = tl.load(pointers, mask=(first + rows < length)[:, None], other=0.0)
    elif width != width_padded:
        tile = tl.load(pointers, mask=(columns < width)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_rows(
    tensor,
    tile,
    first,
    stride,
    length,
    width: tl.constexpr,
    width_padded: tl.constexpr,
    block: tl.constexpr,
):
    """The inverse of `load_rows`, bounded, in the dtype of `tensor`."""
    rows = tl.arange(0, block)
    columns = tl.arange(0, width_padded)
    pointers = tensor + tl.cast(first, tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    inside = (first + rows < length)[:, None] & (columns < width)[None, :]
    tl.store(pointers, tile.to(tensor.dtype.element_ty), mask=inside)


@triton.jit
def look_up(table, distances, seen, masked: tl.constexpr):
    """table[distances]; where masked, 0 for the pairs that are not seen."""
    if masked:
        values = tl.load(table + distances, mask=seen, other=0.0)
    else:
        values = tl.load(table + distances)
    return values


@triton.jit
def gain_of(gains, distances, seen, scale, masked: tl.constexpr):
    """What a score q·k is multiplied with: `scale`, or the table of gains, which has that scale in it."""
    if gains is None:
        gain = scale
    else:
        gain = look_up(gains, distances, seen, masked)
    return gain


@triton.jit
def logits_of(scores, gain, biases, distances, seen, masked: tl.constexpr):
    """log2(e)·L of a tile, −∞ for the pairs that are not seen."""
    logits = scores * gain
    if biases is not None:
        logits += look_up(biases, distances, seen, masked)
    if masked:
        logits = tl.where(seen, logits, float("-inf"))
    return logits
