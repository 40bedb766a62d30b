"""The order of the data: random in windows, the same from wherever it is entered, and cheap to enter.

That a pass has every block once is tested in test_module.py, and that the order never changes in tests/golden.
"""

import pickle
from collections import Counter

import numpy as np
import pytest

from anlit.data import order as order_module
from anlit.data.order import BlockOrder, blocks_per_chunk, quotas, spread
from anlit.errors import UserError

CHUNKS = np.array([30, 0, 41, 17, 30, 25, 8, 33])


def order_of(window_blocks: int, seed: int = 3) -> BlockOrder:
    return BlockOrder([CHUNKS], True, seed, window_blocks)


def blocks(order: BlockOrder, first: int, count: int) -> np.ndarray:
    return order.draw(first, count)[1]


@pytest.mark.parametrize("length", [1, 3, 7, 16])
def test_blocks_belong_to_the_chunk_they_begin_in(length: int) -> None:
    tokens = [20, 1, 0, 33, 5, 2]
    chunk_of_token = np.repeat(np.arange(len(tokens)), tokens)
    n_blocks = (sum(tokens) - 1) // length
    expected = np.bincount(chunk_of_token[: n_blocks * length : length], minlength=len(tokens))
    assert blocks_per_chunk(tokens, length).tolist() == expected.tolist()


@pytest.mark.parametrize("window", [1, 20, 60, 1000])
def test_a_draw_is_the_same_wherever_the_stream_is_entered(window: int) -> None:
    whole, used, n = blocks(order_of(window), 0, 1000), order_of(window), int(CHUNKS.sum())
    assert len({each.tobytes() for each in (whole[:n], whole[n : 2 * n], blocks(order_of(window, 4), 0, n))}) == 3
    rng = np.random.default_rng(0)
    for first in rng.integers(0, 700, 30).tolist():
        count = int(rng.integers(0, 300))
        for order in (order_of(window), used, pickle.loads(pickle.dumps(used))):
            assert np.array_equal(blocks(order, first, count), whole[first : first + count])


def test_a_window_has_few_chunks_and_mixes_them() -> None:
    order = order_of(60)
    chunks = np.searchsorted(np.cumsum(CHUNKS), blocks(order, 0, order.n_blocks), side="right")
    ends = [np.flatnonzero(chunks == chunk)[[0, -1]] for chunk in np.unique(chunks)]
    assert max(sum(first <= draw <= last for first, last in ends) for draw in range(order.n_blocks)) <= 4
    assert np.abs(np.diff(chunks)).astype(bool).mean() > 0.4
    mixed = np.searchsorted(np.cumsum(CHUNKS), blocks(order_of(1000), 0, 40), side="right")
    assert set(mixed.tolist()) == {0, 2, 3, 4, 5, 6, 7}


def test_entering_far_into_the_stream_costs_one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    shuffled, generator = [], order_module.generator
    monkeypatch.setattr(order_module, "generator", lambda *key: (shuffled.append(key), generator(*key))[1])
    order = BlockOrder([blocks_per_chunk([2**25] * 2000, 2048)], True, seed=0, window_blocks=2**29 // 2048)
    assert len(set(blocks(order, int(7.9 * order.n_blocks), 8).tolist())) == 8
    assert len(shuffled) == 2  # the chunks of the pass and the blocks of the window
    assert sum(len(window) for window in order._windows.values()) < 1.1 * 2**29 / 2048


@pytest.mark.parametrize("sizes", [[5], [7, 7], [100, 9, 1], [3, 0, 50, 50], [0, 4]])
def test_spread_deals_evenly(sizes: list[int]) -> None:
    total = sum(sizes)
    sources, before = spread(np.arange(total), sizes)
    assert Counter(sources.tolist()) == {source: size for source, size in enumerate(sizes) if size}
    for source, size in enumerate(sizes):
        places, step = np.flatnonzero(sources == source), total / max(size, 1)
        assert before[places].tolist() == list(range(size))
        assert np.abs((np.arange(size) + 0.5) * step - places).max(initial=0) <= step + 2


def test_quotas_are_the_weights_in_whole_numbers() -> None:
    assert quotas([1, 1, 1]).tolist() == [3334, 3333, 3333]
    assert quotas([67, 15, 4.5, 4.5, 2.5, 4.5, 2]).tolist() == [6700, 1500, 450, 450, 250, 450, 200]
    assert quotas([0.2, 0, 0.6]).tolist() == [2500, 0, 7500]
    with pytest.raises(UserError, match=r"weights has 1e-05, less than one sequence in 10,000: set it to 0"):
        quotas([1, 0.00001])
