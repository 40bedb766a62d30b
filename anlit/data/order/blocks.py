"""The order of blocks, a pure function of a seed and the draw's number: there is no state to save.

A draw is one sequence of training. A source is one long array of tokens, cut into blocks; the blocks of a chunk (one
file of it) are those that begin in it. A pass has every block once; draws are numbered through all passes. The random
numbers are MT19937's through numpy's RandomState, whose streams are frozen: every version of numpy gives this order.
"""

from collections.abc import Sequence

import numpy as np

WINDOW_TOKENS = 2**29
MOST_WINDOW_BLOCKS = 2**20  # so that a permutation takes 40 ms and 8 MB, however short the blocks are


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


class BlockOrder:
    """The blocks of some sources as one: in a pass every block of each comes exactly once.

    With shuffling, each pass puts the chunks of all sources into a random order, cuts that order into windows of about
    `window_blocks`, and mixes all blocks of a window. So a small corpus is mixed completely, and a large one uses the
    chunks of one window at a time. Finding a draw costs the same everywhere in a pass. Without shuffling, each source
    is read in its order, and they alternate in proportion to their sizes.

    Args:
        chunk_blocks: of each source, (chunks,) blocks that begin in each of its chunks.
        seed: not negative.
        number: tells apart the orders of one mixture.
    """

    def __init__(
        self,
        chunk_blocks: Sequence[np.ndarray],
        shuffle: bool,
        seed: int,
        window_blocks: int = MOST_WINDOW_BLOCKS,
        number: int = 0,
    ) -> None:
        self.shuffle, self.seed, self.number = shuffle, seed, number
        self.sizes = [int(blocks.sum()) for blocks in chunk_blocks]
        self.n_blocks = sum(self.sizes)
        self.first_of_source = np.cumsum([0, *self.sizes])
        self.chunk_blocks = np.concatenate(chunk_blocks)
        self.first_of_chunk = np.cumsum(self.chunk_blocks) - self.chunk_blocks
        self.window_blocks = min(window_blocks, MOST_WINDOW_BLOCKS)
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
            window = (draws + counts // 2) * n_windows // self.n_blocks  # that which a chunk's middle falls into
            first_chunk = np.flatnonzero(np.diff(window, prepend=-1))
            self._pass = (pass_number, chunks, draws[first_chunk], np.append(first_chunk, len(chunks)))
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
