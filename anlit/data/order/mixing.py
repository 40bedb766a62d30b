"""Several sources in one order: every block of each once a pass, or in given proportions.

As in `anlit.data.order.blocks`, everything is a function of the seed and the draw's number.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from anlit.data.order.blocks import MOST_WINDOW_BLOCKS, WINDOW_TOKENS, BlockOrder, blocks_per_chunk, generator
from anlit.errors import UserError

PERIOD = 10_000
"""Draws in which a mixture holds its weights exactly."""


class Order(Protocol):
    """Which block of which source each draw is."""

    n_blocks: int
    """Blocks of a pass through all sources."""

    def draw(self, first_draw: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and block of `count` draws from `first_draw` on, each (count,) int64."""


def spread(draws: np.ndarray, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Deal sum(sizes) draws out to the sources as evenly as whole numbers allow, each source `size` times.

    Args:
        draws: (n,) int64, each from 0 to sum(sizes) − 1.

    Returns:
        The source of each draw, and how many draws that source had before it.
    """
    source = np.full(len(draws), len(sizes) - 1)
    rest, left = draws.astype(np.int64), int(sum(sizes))
    undecided = np.ones(len(draws), dtype=bool)
    before = rest
    for number, size in enumerate(sizes[:-1]):
        given = rest * size // max(left, 1)
        mine = undecided & ((rest + 1) * size // max(left, 1) > given)
        source[mine] = number
        before = np.where(mine, given, before)
        undecided &= ~mine
        rest, left = rest - given, left - size
    return source, np.where(undecided, rest, before)


class PooledOrder:
    """Several sources as one: in a pass every block of each comes exactly once.

    With shuffling it is the `BlockOrder` of all their chunks. Without, each source is read in its order, and they
    alternate in proportion to their sizes.

    Args:
        chunk_blocks: of each source, the blocks that begin in each of its chunks.
    """

    def __init__(
        self,
        chunk_blocks: Sequence[np.ndarray],
        shuffle: bool,
        seed: int,
        window_blocks: int = MOST_WINDOW_BLOCKS,
        number: int = 0,
    ) -> None:
        self.sizes = [int(blocks.sum()) for blocks in chunk_blocks]
        self.n_blocks = sum(self.sizes)
        self.shuffle = shuffle
        self.first_block = np.cumsum([0, *self.sizes])
        self.order = BlockOrder(np.concatenate(chunk_blocks), shuffle, seed, window_blocks, number)

    @property
    def n_sources(self) -> int:
        return len(self.sizes)

    def draw(self, first_draw: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and block of `count` draws from `first_draw` on, each (count,) int64."""
        if not self.shuffle:
            return spread(np.arange(first_draw, first_draw + count) % self.n_blocks, self.sizes)
        blocks = self.order.blocks(first_draw, count)
        sources = np.searchsorted(self.first_block, blocks, side="right") - 1
        return sources, blocks - self.first_block[sources]


class MixtureOrder:
    """Sources in given proportions, each going through its own passes.

    Each member has exactly its quota of every `PERIOD` draws. Within a period they are mixed at random, or spread
    evenly if nothing is shuffled.

    Args:
        weights: one for each member, not negative, not all 0; they need not sum to 1.

    Raises:
        UserError: a weight is so small that it would have no draw in a period.
    """

    def __init__(self, orders: Sequence[PooledOrder], weights: Sequence[float], shuffle: bool, seed: int) -> None:
        self.orders, self.shuffle, self.seed = list(orders), shuffle, seed
        self.quotas = quotas(weights)
        self.first_source = np.cumsum([0, *(order.n_sources for order in orders)])
        self.n_blocks = sum(order.n_blocks for order, quota in zip(orders, self.quotas, strict=True) if quota)
        self._period: tuple[int, np.ndarray, np.ndarray] | None = None

    def draw(self, first_draw: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and block of `count` draws from `first_draw` on, each (count,) int64."""
        members, draws = self._members(first_draw, count)
        sources, blocks = np.empty_like(draws), np.empty_like(draws)
        for member in np.unique(members):
            mine = members == member
            order = self.orders[member]
            source, blocks[mine] = order.draw(int(draws[mine][0]), int(mine.sum()))
            sources[mine] = source + self.first_source[member]
        return sources, blocks

    def _members(self, first_draw: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The member of each draw, and which of that member's own draws it is."""
        members, draws = [], []
        while count:
            period, begin = divmod(first_draw, PERIOD)
            member, earlier = (part[begin:][:count] for part in self._layout(period))
            members.append(member)
            draws.append(earlier + period * self.quotas[member])
            first_draw, count = first_draw + len(member), count - len(member)
        return np.concatenate(members), np.concatenate(draws)

    def _layout(self, period: int) -> tuple[np.ndarray, np.ndarray]:
        """(PERIOD,) members of a period's draws, and how many draws of the period each had before."""
        if self._period is None or self._period[0] != period:
            if self.shuffle:
                members = np.repeat(np.arange(len(self.quotas)), self.quotas)
                generator(self.seed, len(self.orders), period, 0).shuffle(members)
                grouped = np.argsort(members, kind="stable")
                earlier = np.empty(PERIOD, dtype=np.int64)
                earlier[grouped] = np.arange(PERIOD) - np.repeat(np.cumsum(self.quotas) - self.quotas, self.quotas)
            else:
                members, earlier = spread(np.arange(PERIOD), self.quotas.tolist())
            self._period = (period, members, earlier)
        return self._period[1:]


def quotas(weights: Sequence[float]) -> np.ndarray:
    """Whole numbers in proportion to `weights` that sum to `PERIOD`, by largest remainder.

    Raises:
        UserError: a positive weight comes to nothing.
    """
    shares = np.asarray(weights, dtype=np.float64)
    shares = shares / shares.sum() * PERIOD
    counts = np.floor(shares).astype(np.int64)
    missing = PERIOD - int(counts.sum())
    counts[np.argsort(counts - shares, kind="stable")[:missing]] += 1
    if (counts[shares > 0] == 0).any():
        small = min(weight for weight in weights if weight > 0)
        raise UserError(
            f"--data.weights has {small:g}, less than one sequence in {PERIOD:,}: set it to 0 or to at least "
            f"{sum(weights) / PERIOD:g}."
        )
    return counts


def training_order(
    chunk_tokens: Mapping[str, Sequence[Sequence[int]]],
    length: int,
    weights: Mapping[str, float] | None,
    shuffle: bool,
    seed: int,
) -> Order:
    """The order in which a corpus is trained on.

    Args:
        chunk_tokens: of each part of the corpus, of each of its sources, the tokens in each chunk.
        length: targets in a block.
        weights: of the parts, one that is not listed has 0; None: all are one, every block comes once.
        seed: not negative.

    Raises:
        UserError: a weight is too small.
    """
    parts = [[blocks_per_chunk(tokens, length) for tokens in sources] for sources in chunk_tokens.values()]
    how = (shuffle, seed, max(1, WINDOW_TOKENS // length))
    if weights is None:
        return PooledOrder([blocks for sources in parts for blocks in sources], *how)
    members = [PooledOrder(sources, *how, number) for number, sources in enumerate(parts)]
    return MixtureOrder(members, [weights.get(name, 0.0) for name in chunk_tokens], shuffle, seed)
