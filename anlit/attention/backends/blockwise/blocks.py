"""The blocks that are computed at a time, and a and m as matrices for them.

Letters: B sequences, H heads of queries, G heads of keys, T length, t distance i − j.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

QUERIES = 128
"""Queries in a block: enough for a matrix product, few enough that little above the diagonal is wasted."""


class Block(NamedTuple):
    """Queries [first, end) of sequences [row, end_row), and the keys [begin, end) that some of them see."""

    row: int
    end_row: int
    begin: int
    first: int
    end: int

    def queries(self, x: Tensor) -> Tensor:
        """The part of x (B, H, T, …) that belongs to these queries, a view."""
        return x[self.row : self.end_row, :, self.first : self.end]

    def keys(self, x: Tensor) -> Tensor:
        """The part of x (B, G, T, …) that belongs to these keys, a view."""
        return x[self.row : self.end_row, :, self.begin : self.end]


def blocks(n_rows: int, length: int, starts: Tensor | None, window: int | None) -> list[Block]:
    """The blocks: of all sequences together or, with documents, of each sequence, which skips keys of its own.

    Args:
        n_rows: B.
        length: T.
        starts: (B, T), where the document of each token begins; None for one document.
        window: How many of the latest keys a query sees; None for all.
    """
    firsts = range(0, length, QUERIES)
    groups = [(0, n_rows, [0] * len(firsts))]
    if starts is not None:
        groups = [(row, row + 1, begins) for row, begins in enumerate(starts[:, ::QUERIES].tolist())]
    return [
        Block(
            row,
            end_row,
            begin if window is None else max(begin, first - window + 1),
            first,
            min(first + QUERIES, length),
        )
        for row, end_row, begins in groups
        for first, begin in zip(firsts, begins, strict=True)
    ]


class Share(NamedTuple):
    """Some of the sequences and heads, which can be computed without the others."""

    rows: slice
    heads: slice
    groups: slice

    def of(self, x: Tensor) -> Tensor:
        """The part of x (B, H, …), a view."""
        return x[self.rows, self.heads]

    def of_keys(self, x: Tensor) -> Tensor:
        """The part of keys or values x (B, G, …), a view."""
        return x[self.rows, self.groups]

    def of_table(self, table: Tensor) -> Tensor:
        """The part of a table over distance, (T,) or (H or 1, T), a view."""
        return table if table.dim() == 1 or len(table) == 1 else table[self.heads]

    def of_starts(self, starts: Tensor | None) -> Tensor | None:
        """The part of (B, T), a view."""
        return None if starts is None else starts[self.rows]


def shares(n_rows: int, n_groups: int, n: int, group: int = 1) -> list[Share]:
    """At most n shares of nearly equal size: of the sequences, or of the groups if there are too few sequences.

    Args:
        n_rows: B.
        n_groups: G; the heads of a group stay together.
        n: How many shares are wanted.
        group: H/G, the heads of a group.
    """
    everything = slice(None)
    by_rows = n_rows >= min(n, n_groups)
    total = n_rows if by_rows else n_groups
    n = min(n, total)
    bounds = [total * number // n for number in range(n + 1)]
    parts = list(pairwise(bounds))
    if by_rows:
        return [Share(slice(*part), everything, everything) for part in parts]
    return [Share(everything, slice(first * group, end * group), slice(first, end)) for first, end in parts]


class Tables:
    """a and m over distance, as matrices for blocks.

    The last key of a block is at its last query. So the matrix of every block is the lower right part of one
    QUERIES × T matrix, whose entry (x, y) is for the distance (T − 1 − y) − (QUERIES − 1 − x).

    Args:
        a, m: (T,), (H or 1, T), or None if trivial.
        length: T.
        window: How many of the latest keys a query sees; None for all. Invisible keys have m = −∞.
        like: A tensor of the precision and device of the matrices.
    """

    def __init__(self, a: Tensor | None, m: Tensor | None, length: int, window: int | None, like: Tensor) -> None:
        self.length, self.window, self.has_bias = length, window, m is not None
        column = torch.arange(length, device=like.device)
        row = torch.arange(QUERIES, device=like.device)
        distance = (length - 1 - column) - (QUERIES - 1 - row[:, None])
        self.index = distance.clamp(0, length - 1)
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        values = like.new_zeros(1, 1, 1) if m is None else m.to(like).reshape(-1, length)[:, self.index]
        self.bias = torch.where(visible, values, -math.inf)
        self.gain = None if a is None else a.to(like).reshape(-1, length)[:, self.index]

    def part(self, matrix: Tensor, block: Block) -> Tensor:
        """The block's part of a matrix (H or 1, QUERIES, T), a view."""
        return matrix[:, QUERIES - (block.end - block.first) :, self.length - (block.end - block.begin) :]

    def to_logits(self, scores: Tensor, block: Block, starts: Tensor | None) -> Tensor:
        """a·scores + m, −∞ where a key is not visible: in place, scores (sequences, H, queries, keys)."""
        if self.gain is not None:
            scores.mul_(self.part(self.gain, block))
        n_keys = block.end - block.begin
        is_in_window = self.window is None or n_keys <= self.window
        if self.has_bias or not is_in_window:
            scores.add_(self.part(self.bias, block))
        else:  # only keys at the positions of the queries may be ahead of a query
            n = block.end - block.first
            scores[..., -n:].add_(self.bias[:, -n:, -n:])
        if starts is not None:
            begins = starts[block.row : block.end_row, block.first : block.end]
            if begins[0, -1] > block.begin:  # else all queries of the block are in one document
                keys = torch.arange(block.begin, block.end, device=scores.device)
                scores.masked_fill_((keys < begins[..., None])[:, None], -math.inf)
        return scores

    def by_distance(self, total: Tensor, like: Tensor) -> Tensor:
        """Sum `total` (H or 1, QUERIES, T) over equal distances; returns the shape of `like`, (T,) or (H or 1, T)."""
        sums = total.new_zeros(len(total), self.length).index_add_(1, self.index.flatten(), total.flatten(1))
        return sums.to(like.dtype).reshape(like.shape)
