"""Several parts of a corpus in one order: every block once a pass, or in given proportions.

As in `blocks`, everything is a function of the seed and the draw's number.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from anlit.data.order.blocks import WINDOW_TOKENS, BlockOrder, blocks_per_chunk, generator, spread
from anlit.errors import UserError

PERIOD = 10_000  # draws in which a mixture holds its weights exactly


class MixtureOrder:
    """Parts in given proportions, each going through its own passes.

    Each part has exactly its quota (`quotas`) of every `PERIOD` draws. Within a period they are mixed at random, or
    spread evenly if nothing is shuffled.
    """

    def __init__(self, parts: Sequence[BlockOrder], weights: Sequence[float], shuffle: bool, seed: int) -> None:
        self.parts, self.shuffle, self.seed = list(parts), shuffle, seed
        self.quotas = quotas(weights)
        self.first_source = np.cumsum([0, *(len(part.sizes) for part in parts)])
        self.n_blocks = sum(part.n_blocks for part, quota in zip(parts, self.quotas, strict=True) if quota)
        """Blocks of a pass through all parts."""
        self._period: tuple[int, np.ndarray, np.ndarray] | None = None

    def draw(self, first_draw: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and block of `count` draws from `first_draw` on, each (count,) int64."""
        if len(self.parts) == 1:
            return self.parts[0].draw(first_draw, count)
        columns, end = [], first_draw + count
        while first_draw < end:  # through the periods
            period, begin = divmod(first_draw, PERIOD)
            part, earlier = (column[begin:][: end - first_draw] for column in self._layout(period))
            columns.append((part, earlier + period * self.quotas[part]))
            first_draw += len(part)
        parts, draws = (np.concatenate(column) for column in zip(*columns, strict=True))
        sources, blocks = np.empty_like(draws), np.empty_like(draws)
        for part in np.unique(parts):
            mine = parts == part
            source, blocks[mine] = self.parts[part].draw(int(draws[mine][0]), int(mine.sum()))
            sources[mine] = source + self.first_source[part]
        return sources, blocks

    def _layout(self, period: int) -> tuple[np.ndarray, np.ndarray]:
        """(PERIOD,) the part of each draw of a period, and how many draws of the period that part had before."""
        if self._period is None or self._period[0] != period:
            if self.shuffle:
                parts = np.repeat(np.arange(len(self.quotas)), self.quotas)
                generator(self.seed, len(self.parts), period, 0).shuffle(parts)
                grouped = np.argsort(parts, kind="stable")
                earlier = np.empty(PERIOD, dtype=np.int64)
                earlier[grouped] = np.arange(PERIOD) - np.repeat(np.cumsum(self.quotas) - self.quotas, self.quotas)
            else:
                parts, earlier = spread(np.arange(PERIOD), self.quotas.tolist())
            self._period = (period, parts, earlier)
        return self._period[1:]


def quotas(weights: Sequence[float]) -> np.ndarray:
    """Whole numbers in proportion to `weights` (not negative, not all 0) that sum to `PERIOD`, by largest remainder.

    Raises UserError for a positive weight that comes to nothing.
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
) -> MixtureOrder:
    """The order in which a corpus is trained on.

    Args:
        chunk_tokens: of each part of the corpus, of each of its sources, the tokens in each chunk.
        length: targets in a block.
        weights: of the parts, one that is not listed has 0; None: all are one, every block comes once.
    """
    parts = [[blocks_per_chunk(tokens, length) for tokens in sources] for sources in chunk_tokens.values()]
    shares = [1.0] if weights is None else [weights.get(name, 0.0) for name in chunk_tokens]
    if weights is None:
        parts = [[blocks for sources in parts for blocks in sources]]
    window_blocks = max(1, WINDOW_TOKENS // length)
    orders = [BlockOrder(sources, shuffle, seed, window_blocks, number) for number, sources in enumerate(parts)]
    return MixtureOrder(orders, shares, shuffle, seed)
