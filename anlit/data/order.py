"""The order of blocks: a pure function of a seed and the number of a draw, without state to save.

A token array is cut into blocks. A block belongs to the chunk (a file of the array) where it
begins. A draw is a training sequence, that is, a block. A pass has every block once. Draws are
numbered through all passes.

The random numbers come from MT19937 through numpy's RandomState. Its streams are frozen: every
version of numpy gives this order.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from anlit.errors import UserError

WINDOW_TOKENS = 2**29
"""Tokens that are shuffled together."""
MOST_WINDOW_BLOCKS = 2**20
"""A permutation of this length takes 40 ms and 8 MB."""
MOST_EXACT_DRAWS = 2**31
"""The product of two numbers up to this one fits 64 bits."""
PERIOD = 10_000
"""Draws in which a mixture holds its weights exactly."""
ChunkTokens = Mapping[str, Sequence[Sequence[int]]]
"""Tokens in each chunk of each array, by the name of the arrays' component of the mixture."""


def generator(seed: int, *key: int) -> np.random.RandomState:
    """Return random numbers for one purpose.

    `key` has three numbers: two keys of different lengths could give the same stream.
    """
    assert len(key) == 3
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([*key, seed])))


def blocks_per_chunk(chunk_tokens: Sequence[int], length: int) -> np.ndarray:
    """Return how many blocks of `length` targets begin in each chunk of an array, (chunks,) int64.

    Block b has the tokens [b·length, b·length + length]. Targets at the end that are too few for a
    block are left out.
    """
    chunk_ends = np.cumsum(np.asarray(chunk_tokens, dtype=np.int64))
    n_blocks = max(0, int(chunk_ends[-1]) - 1) // length if len(chunk_ends) else 0
    return np.diff(np.minimum(-(-chunk_ends // length), n_blocks), prepend=0)


def deal_evenly(draws: np.ndarray, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Deal sum(sizes) draws out to the arrays as evenly as whole numbers allow.

    Array i gets sizes[i] draws. `draws` are (n,) from 0 to sum(sizes) − 1. Returns the array of
    each draw, and how many earlier draws that array had, both (n,) int64.
    """
    arrays = np.full(len(draws), len(sizes) - 1)
    total = int(sum(sizes))
    # Products of a draw and a size may need more than 64 bits, which Python's integers have.
    number_type = np.int64 if total < MOST_EXACT_DRAWS else object
    # The arrays take their draws in turn. `position` counts the draws not yet taken.
    position = draws.astype(number_type)
    is_open = np.ones(len(draws), dtype=bool)
    earlier_draws = position
    for number, size in enumerate(sizes[:-1]):
        n_taken = position * size // max(total, 1)
        takes = is_open & ((position + 1) * size // max(total, 1) > n_taken)
        arrays[takes] = number
        earlier_draws = np.where(takes, n_taken, earlier_draws)
        is_open &= ~takes
        position = position - n_taken
        total -= size
    return arrays, np.where(is_open, position, earlier_draws).astype(np.int64)


class _Pass(NamedTuple):
    """The layout of a shuffled pass."""

    number: int
    chunks: np.ndarray  # (chunks,) in their order in this pass
    window_draws: np.ndarray  # (windows,) the first draw of each window
    window_chunks: np.ndarray  # (windows + 1,) the first chunk of each window, and the end


class BlockOrder:
    """The blocks of several arrays in one order: a pass has every block exactly once.

    With shuffling, each pass puts the chunks of all arrays into a random order. It cuts that order
    into windows of about `window_blocks`, and mixes the blocks of each window. So a small corpus is
    mixed completely, and a large corpus uses few chunks at a time. Finding a draw costs the same
    everywhere in a pass. Without shuffling, each array is read in its order, and arrays alternate
    in proportion to their sizes.

    Args:
        chunk_blocks: for each array, (chunks,) the blocks that begin in each chunk.
        shuffle: whether to shuffle.
        seed: seed of the order.
        window_blocks: blocks of a window.
        number: distinguishes the orders of a mixture.
    """

    def __init__(
        self,
        chunk_blocks: Sequence[np.ndarray],
        shuffle: bool,
        seed: int,
        window_blocks: int,
        number: int = 0,
    ) -> None:
        self.shuffle = shuffle
        self.seed = seed
        self.number = number
        self.sizes = [int(blocks.sum()) for blocks in chunk_blocks]
        self.n_blocks = sum(self.sizes)
        self.first_of_array = np.cumsum([0, *self.sizes])
        self.chunk_blocks = np.concatenate(chunk_blocks)
        self.first_of_chunk = np.cumsum(self.chunk_blocks) - self.chunk_blocks
        self.window_blocks = min(max(1, window_blocks), MOST_WINDOW_BLOCKS)
        self._pass: _Pass | None = None
        self._windows: dict[tuple[int, int], np.ndarray] = {}

    def draw(self, first_draw: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return array and block of `count` draws from `first_draw` on, each (count,) int64."""
        if not self.shuffle:
            draws = np.arange(first_draw, first_draw + count)
            return deal_evenly(draws % self.n_blocks, self.sizes)
        pieces = [np.empty(0, dtype=np.int64)]
        while count:
            pass_number, offset = divmod(first_draw, self.n_blocks)
            window_draws = self._get_pass(pass_number).window_draws
            window = int(np.searchsorted(window_draws, offset, side="right")) - 1
            offset -= int(window_draws[window])
            piece = self._get_window(pass_number, window)[offset:][:count]
            pieces.append(piece)
            first_draw += len(piece)
            count -= len(piece)
        blocks = np.concatenate(pieces)
        arrays = np.searchsorted(self.first_of_array, blocks, side="right") - 1
        return arrays, blocks - self.first_of_array[arrays]

    def _get_pass(self, number: int) -> _Pass:
        if self._pass is None or self._pass.number != number:
            self._pass = self._make_pass(number)
        return self._pass

    def _make_pass(self, number: int) -> _Pass:
        chunks = np.flatnonzero(self.chunk_blocks)
        generator(self.seed, self.number, number, 0).shuffle(chunks)
        counts = self.chunk_blocks[chunks]
        first_draws = np.cumsum(counts) - counts
        n_windows = max(1, round(self.n_blocks / self.window_blocks))
        # A chunk belongs to the window that holds its middle.
        windows = (first_draws + counts // 2) * n_windows // self.n_blocks
        window_chunks = np.flatnonzero(np.diff(windows, prepend=-1))
        return _Pass(
            number, chunks, first_draws[window_chunks], np.append(window_chunks, len(chunks))
        )

    def _get_window(self, pass_number: int, window: int) -> np.ndarray:
        """Return the shuffled blocks of a window, numbered through all arrays.

        The last two windows stay in memory: a batch may cross a border.
        """
        key = (pass_number, window)
        if key not in self._windows:
            latest_windows = dict(list(self._windows.items())[-1:])
            self._windows = {**latest_windows, key: self._make_window(pass_number, window)}
        return self._windows[key]

    def _make_window(self, pass_number: int, window: int) -> np.ndarray:
        layout = self._get_pass(pass_number)
        first_chunk = layout.window_chunks[window]
        chunks = layout.chunks[first_chunk : layout.window_chunks[window + 1]]
        counts = self.chunk_blocks[chunks]
        shift = self.first_of_chunk[chunks] - (np.cumsum(counts) - counts)
        blocks = np.arange(counts.sum()) + np.repeat(shift, counts)
        generator(self.seed, self.number, pass_number, window + 1).shuffle(blocks)
        return blocks


class MixtureOrder:
    """Components in fixed proportions: each has its quota of every `PERIOD` draws.

    Each component goes through its passes at its pace. Within a period the components are mixed at
    random, or alternate evenly if nothing is shuffled.
    """

    def __init__(
        self, components: Sequence[BlockOrder], weights: Sequence[float], shuffle: bool, seed: int
    ) -> None:
        self.components = components
        self.shuffle = shuffle
        self.seed = seed
        self.quotas = draws_per_period(weights)
        array_counts = [len(component.sizes) for component in components]
        self.first_array = np.cumsum([0, *array_counts])
        self.n_blocks = 0  # of a pass through all components that are drawn from
        for component, quota in zip(components, self.quotas, strict=True):
            if quota:
                self.n_blocks += component.n_blocks
        self._period: tuple[int, np.ndarray, np.ndarray] | None = None

    def draw(self, first_draw: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return array and block of `count` draws from `first_draw` on, each (count,) int64."""
        if len(self.components) == 1:
            return self.components[0].draw(first_draw, count)
        numbers, draws = self._component_draws(first_draw, count)
        arrays = np.empty_like(draws)
        blocks = np.empty_like(draws)
        for number in np.unique(numbers):
            is_drawn = numbers == number
            first = int(draws[is_drawn][0])
            array, blocks[is_drawn] = self.components[number].draw(first, int(is_drawn.sum()))
            arrays[is_drawn] = array + self.first_array[number]
        return arrays, blocks

    def _component_draws(self, first_draw: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the component of each draw, and the number of the draw within the component."""
        number_pieces = []
        draw_pieces = []
        end = first_draw + count
        while first_draw < end:
            period, begin = divmod(first_draw, PERIOD)
            numbers, earlier_draws = self._get_period(period)
            numbers = numbers[begin:][: end - first_draw]
            earlier_draws = earlier_draws[begin:][: end - first_draw]
            number_pieces.append(numbers)
            draw_pieces.append(earlier_draws + period * self.quotas[numbers])
            first_draw += len(numbers)
        return np.concatenate(number_pieces), np.concatenate(draw_pieces)

    def _get_period(self, period: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each draw of a period, the component and its earlier draws in the period."""
        if self._period is None or self._period[0] != period:
            if self.shuffle:
                self._period = (period, *self._shuffle_period(period))
            else:
                self._period = (period, *deal_evenly(np.arange(PERIOD), self.quotas.tolist()))
        return self._period[1:]

    def _shuffle_period(self, period: int) -> tuple[np.ndarray, np.ndarray]:
        numbers = np.repeat(np.arange(len(self.quotas)), self.quotas)
        generator(self.seed, len(self.components), period, 0).shuffle(numbers)
        draws_by_component = np.argsort(numbers, kind="stable")
        first_positions = np.repeat(np.cumsum(self.quotas) - self.quotas, self.quotas)
        earlier_draws = np.empty(PERIOD, dtype=np.int64)
        earlier_draws[draws_by_component] = np.arange(PERIOD) - first_positions
        return numbers, earlier_draws


def draws_per_period(weights: Sequence[float]) -> np.ndarray:
    """Return whole numbers in proportion to `weights` that sum to `PERIOD`, by largest remainder.

    Weights are not negative and not all 0. Raises UserError for a positive weight that gets no
    draw.
    """
    exact = np.asarray(weights, dtype=np.float64)
    exact = exact / exact.sum() * PERIOD
    counts = np.floor(exact).astype(np.int64)
    n_missing = PERIOD - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:n_missing]] += 1
    if (counts[exact > 0] == 0).any():
        smallest = min(weight for weight in weights if weight > 0)
        raise UserError(
            f"--data.weights has {smallest:g}, less than one sequence in {PERIOD:,}: "
            f"set it to 0 or to at least {sum(weights) / PERIOD:g}"
        )
    return counts


def training_order(
    chunk_tokens: ChunkTokens,
    length: int,
    weights: Mapping[str, float] | None,
    shuffle: bool,
    seed: int,
) -> MixtureOrder:
    """Return the order of a corpus in training, in blocks of `length` targets.

    `weights` belong to the components. A component that is not listed has 0. Without weights there
    is a single component, and every block comes once.
    """
    components: list[list[np.ndarray]] = []
    for arrays in chunk_tokens.values():
        components.append([blocks_per_chunk(tokens, length) for tokens in arrays])
    if weights is None:
        components = [list(chain.from_iterable(components))]
        component_weights = [1.0]
    else:
        component_weights = [weights.get(name, 0.0) for name in chunk_tokens]
    window_blocks = WINDOW_TOKENS // length
    orders = []
    for number, arrays_of_component in enumerate(components):
        orders.append(BlockOrder(arrays_of_component, shuffle, seed, window_blocks, number))
    return MixtureOrder(orders, component_weights, shuffle, seed)
