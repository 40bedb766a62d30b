"""The order of blocks, a pure function of a seed and the draw's number: there is no state to save.

A draw is one sequence of training. A source is one long array of tokens, cut into blocks; the blocks of a chunk (one
file of it) are those that begin in it. A pass has every block once; draws are numbered through all passes. The random
numbers are MT19937's through numpy's RandomState, whose streams are frozen: every version of numpy gives this order.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from anlit.errors import UserError

WINDOW_TOKENS = 2**29
MOST_WINDOW_BLOCKS = (
    2**20
)  # so that a permutation takes 40 ms and 8 MB, however short the blocks are
Tokens = Mapping[str, Sequence[Sequence[int]]]
PERIOD = 10_000  # draws in which a mixture holds its weights exactly


def generator(seed: int, *key: int) -> np.random.RandomState:
    """Random numbers for one purpose; `key` has three numbers, or keys of different lengths could be alike."""
    assert len(key) == 3
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([*key, seed])))


def blocks_per_chunk(chunk_tokens: Sequence[int], length: int) -> np.ndarray:
    """How many of a source's blocks of `length` targets begin in each of its chunks, (chunks,) int64.

    Block b is tokens [b·length, b·length + length], so all but the source's last ones are whole.
    """
    ends = np.cumsum(np.asarray(chunk_tokens, dtype=np.int64))
    n_blocks = max(0, int(ends[-1]) - 1) // length if len(ends) else 0
    return np.diff(np.minimum(-(-ends // length), n_blocks), prepend=0)


def spread(draws: np.ndarray, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Deal sum(sizes) draws out to the sources as evenly as whole numbers allow, each source `size` times.

    Returns the source of each of `draws`, (n,) int64 from 0 to sum(sizes) − 1, and how many draws that source had
    before it.
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


class BlockOrder:
    """The blocks of some sources as one: in a pass every block of each comes exactly once.

    With shuffling, each pass puts the chunks of all sources into a random order, cuts that order into windows of about
    `window_blocks`, and mixes all blocks of a window. So a small corpus is mixed completely, and a large one uses the
    chunks of one window at a time. Finding a draw costs the same everywhere in a pass. Without shuffling, each source
    is read in its order, and they alternate in proportion to their sizes. `chunk_blocks` are of each source, (chunks,)
    blocks that begin in each of its chunks; `number` tells apart the orders of one mixture.
    """

    def __init__(
        self,
        chunk_blocks: Sequence[np.ndarray],
        shuffle: bool,
        seed: int,
        window_blocks: int,
        number: int = 0,
    ) -> None:
        self.shuffle, self.seed, self.number = shuffle, seed, number
        self.sizes = [int(blocks.sum()) for blocks in chunk_blocks]
        self.n_blocks = sum(self.sizes)
        self.first_of_source = np.cumsum([0, *self.sizes])
        self.chunk_blocks = np.concatenate(chunk_blocks)
        self.first_of_chunk = np.cumsum(self.chunk_blocks) - self.chunk_blocks
        self.window_blocks = min(max(1, window_blocks), MOST_WINDOW_BLOCKS)
        self._pass: tuple[int, np.ndarray, np.ndarray, np.ndarray] | None = None
        self._windows: dict[tuple[int, int], np.ndarray] = {}

    def draw(self, first_draw: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and block of `count` draws from `first_draw` on, each (count,) int64."""
        if not self.shuffle:
            return spread(np.arange(first_draw, first_draw + count) % self.n_blocks, self.sizes)
        parts = [np.empty(0, dtype=np.int64)]
        while count:
            pass_number, offset = divmod(first_draw, self.n_blocks)
            _, window_draws, _ = self._layout(pass_number)
            window = int(np.searchsorted(window_draws, offset, side="right")) - 1
            part = self._window(pass_number, window)[offset - int(window_draws[window]) :][:count]
            parts.append(part)
            first_draw, count = first_draw + len(part), count - len(part)
        blocks = np.concatenate(parts)
        sources = np.searchsorted(self.first_of_source, blocks, side="right") - 1
        return sources, blocks - self.first_of_source[sources]

    def _layout(self, pass_number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A pass's chunks in their order; each window's first draw; each window's first chunk, and the end."""
        if self._pass is None or self._pass[0] != pass_number:
            chunks = np.flatnonzero(self.chunk_blocks)
            generator(self.seed, self.number, pass_number, 0).shuffle(chunks)
            counts = self.chunk_blocks[chunks]
            draws = np.cumsum(counts) - counts
            n_windows = max(1, round(self.n_blocks / self.window_blocks))
            window = (
                (draws + counts // 2) * n_windows // self.n_blocks
            )  # that which a chunk's middle falls into
            first_chunk = np.flatnonzero(np.diff(window, prepend=-1))
            self._pass = (
                pass_number,
                chunks,
                draws[first_chunk],
                np.append(first_chunk, len(chunks)),
            )
        return self._pass[1:]

    def _window(self, pass_number: int, window: int) -> np.ndarray:
        """The shuffled blocks of a window, numbered through all sources; those of the last two are kept."""
        key = (pass_number, window)
        if key not in self._windows:
            order, _, first_chunk = self._layout(pass_number)
            chunks = order[first_chunk[window] : first_chunk[window + 1]]
            counts = self.chunk_blocks[chunks]
            shift = self.first_of_chunk[chunks] - (np.cumsum(counts) - counts)
            blocks = np.arange(counts.sum()) + np.repeat(shift, counts)
            generator(self.seed, self.number, pass_number, window + 1).shuffle(blocks)
            self._windows = {**dict(list(self._windows.items())[-1:]), key: blocks}
        return self._windows[key]


class MixtureOrder:
    """Parts in given proportions, each going through its own passes, and with its quota of every `PERIOD` draws.

    Within a period they are mixed at random, or spread evenly if nothing is shuffled.
    """

    def __init__(
        self, parts: Sequence[BlockOrder], weights: Sequence[float], shuffle: bool, seed: int
    ) -> None:
        self.parts, self.shuffle, self.seed = parts, shuffle, seed
        self.quotas = quotas(weights)
        self.first_source = np.cumsum([0, *(len(part.sizes) for part in parts)])
        self.n_blocks = sum(
            part.n_blocks for part, quota in zip(parts, self.quotas, strict=True) if quota
        )
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
                grouped, earlier = (
                    np.argsort(parts, kind="stable"),
                    np.empty(PERIOD, dtype=np.int64),
                )
                earlier[grouped] = np.arange(PERIOD) - np.repeat(
                    np.cumsum(self.quotas) - self.quotas, self.quotas
                )
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
    counts[np.argsort(counts - shares, kind="stable")[: PERIOD - int(counts.sum())]] += 1
    if (counts[shares > 0] == 0).any():
        small, least = min(weight for weight in weights if weight > 0), sum(weights) / PERIOD
        raise UserError(
            f"--data.weights has {small:g}, less than one sequence in {PERIOD:,}: set it to 0 or to at least {least:g}."
        )
    return counts


def training_order(
    chunk_tokens: Tokens, length: int, weights: Mapping[str, float] | None, shuffle: bool, seed: int
) -> MixtureOrder:
    """The order in which a corpus is trained on, in blocks of `length` targets.

    `chunk_tokens` are, of each part of the corpus, of each of its sources, the tokens in each chunk. `weights` are of
    the parts, one that is not listed has 0; None: all are one, every block comes once.
    """
    parts = [
        [blocks_per_chunk(tokens, length) for tokens in sources]
        for sources in chunk_tokens.values()
    ]
    shares = [1.0] if weights is None else [weights.get(name, 0.0) for name in chunk_tokens]
    if weights is None:
        parts = [[blocks for sources in parts for blocks in sources]]
    window = WINDOW_TOKENS // length
    orders = [
        BlockOrder(sources, shuffle, seed, window, number) for number, sources in enumerate(parts)
    ]
    return MixtureOrder(orders, shares, shuffle, seed)
