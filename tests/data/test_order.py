"""The order of the data: complete, random, the same from wherever it is entered, and cheap to enter."""

import pickle
from collections import Counter

import numpy as np
import pytest

from anlit.data.order import blocks as order_module
from anlit.data.order.blocks import BlockOrder, blocks_per_chunk
from anlit.data.order.mixing import PooledOrder, quotas, spread, training_order
from anlit.errors import UserError

GOLDEN_BLOCKS = [135, 140, 167, 153, 145, 148, 76, 136]
GOLDEN_MIXTURE = [(0, 101), (0, 32), (1, 2), (0, 114), (1, 38), (0, 55), (0, 81), (0, 113)]
CHUNKS = np.array([30, 0, 41, 17, 30, 25, 8, 33])
FIRST = np.cumsum(CHUNKS) - CHUNKS


def chunk_of(blocks: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(CHUNKS), blocks, side="right")


@pytest.mark.parametrize("length", [1, 3, 7, 16])
def test_blocks_belong_to_the_chunk_they_begin_in(length: int) -> None:
    tokens = [20, 1, 0, 33, 5, 2]
    chunk_of_token = np.repeat(np.arange(len(tokens)), tokens)
    n_blocks = (sum(tokens) - 1) // length
    expected = [int((chunk_of_token[: n_blocks * length : length] == chunk).sum()) for chunk in range(len(tokens))]
    assert blocks_per_chunk(tokens, length).tolist() == expected


@pytest.mark.parametrize("window", [1, 20, 60, 1000])
def test_every_pass_has_each_block_once_in_its_own_order(window: int) -> None:
    order = BlockOrder(CHUNKS, True, seed=3, window_blocks=window)
    n = order.n_blocks
    passes = [order.blocks(number * n, n) for number in range(3)]
    for blocks in passes:
        assert np.array_equal(np.sort(blocks), np.arange(n))
    assert not np.array_equal(passes[0], passes[1])
    assert not np.array_equal(passes[1], passes[2])
    other = BlockOrder(CHUNKS, True, seed=4, window_blocks=window).blocks(0, n)
    assert not np.array_equal(passes[0], other)


@pytest.mark.parametrize("window", [20, 60, 1000])
def test_a_draw_is_the_same_wherever_the_stream_is_entered(window: int) -> None:
    whole = BlockOrder(CHUNKS, True, seed=3, window_blocks=window).blocks(0, 1000)
    rng = np.random.default_rng(0)
    used = BlockOrder(CHUNKS, True, seed=3, window_blocks=window)
    for first in rng.integers(0, 700, 30).tolist():
        count = int(rng.integers(0, 300))
        fresh = BlockOrder(CHUNKS, True, seed=3, window_blocks=window)
        assert np.array_equal(fresh.blocks(first, count), whole[first : first + count])
        assert np.array_equal(used.blocks(first, count), whole[first : first + count])
        assert np.array_equal(pickle.loads(pickle.dumps(used)).blocks(first, count), whole[first : first + count])


def test_a_window_has_few_chunks_and_mixes_them() -> None:
    order = BlockOrder(CHUNKS, True, seed=3, window_blocks=60)
    chunks = chunk_of(order.blocks(0, order.n_blocks))
    lasts = {chunk: np.flatnonzero(chunks == chunk)[[0, -1]] for chunk in np.unique(chunks)}
    in_use = [sum(first <= draw <= last for first, last in lasts.values()) for draw in range(order.n_blocks)]
    assert max(in_use) <= 4
    assert np.abs(np.diff(chunks)).astype(bool).mean() > 0.4
    everything = chunk_of(BlockOrder(CHUNKS, True, seed=3).blocks(0, 40))
    assert set(everything.tolist()) == {0, 2, 3, 4, 5, 6, 7}


def test_the_order_never_changes() -> None:
    """A checkpoint's place means these blocks; with other numbers no older run can be continued or repeated."""
    assert BlockOrder(CHUNKS, True, seed=42, window_blocks=60).blocks(180, 8).tolist() == GOLDEN_BLOCKS
    sources, blocks = training_order({"a": [[900, 300]], "b": [[500]]}, 10, {"a": 2, "b": 1}, True, 42).draw(9_996, 8)
    assert list(zip(sources.tolist(), blocks.tolist(), strict=True)) == GOLDEN_MIXTURE


def test_entering_far_into_the_stream_costs_one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    shuffled = []
    real = order_module.generator

    def counting(*key: int) -> np.random.RandomState:
        shuffled.append(key)
        return real(*key)

    monkeypatch.setattr(order_module, "generator", counting)
    chunk = blocks_per_chunk([2**25] * 2000, 2048)
    order = BlockOrder(chunk, True, seed=0, window_blocks=2**29 // 2048)
    blocks = order.blocks(int(7.9 * order.n_blocks), 8)
    assert len(set(blocks.tolist())) == 8
    assert len(shuffled) == 2  # the chunks of the pass and the blocks of the window
    assert sum(len(window) for window in order._windows.values()) < 1.1 * 2**29 / 2048


@pytest.mark.parametrize("sizes", [[5], [7, 7], [100, 9, 1], [3, 0, 50, 50], [0, 4]])
def test_spread_deals_evenly(sizes: list[int]) -> None:
    total = sum(sizes)
    sources, before = spread(np.arange(total), sizes)
    assert Counter(sources.tolist()) == {source: size for source, size in enumerate(sizes) if size}
    for source, size in enumerate(sizes):
        places = np.flatnonzero(sources == source)
        assert before[places].tolist() == list(range(size))
        assert (
            np.abs((np.arange(size) + 0.5) * total / max(size, 1) - places).max(initial=0) <= total / max(size, 1) + 2
        )


def test_quotas_are_the_weights_in_whole_numbers() -> None:
    assert quotas([1, 1, 1]).tolist() == [3334, 3333, 3333]
    assert quotas([67, 15, 4.5, 4.5, 2.5, 4.5, 2]).tolist() == [6700, 1500, 450, 450, 250, 450, 200]
    assert quotas([0.2, 0, 0.6]).tolist() == [2500, 0, 7500]
    with pytest.raises(UserError, match=r"weights has 1e-05, less than one sequence in 10,000: set it to 0"):
        quotas([1, 0.00001])


def members(shuffle: bool) -> list[PooledOrder]:
    parts = [[np.array([300, 200]), np.array([77])], [np.array([40])], [np.array([900])]]
    return [PooledOrder(part, shuffle, seed=5, window_blocks=250, number=n) for n, part in enumerate(parts)]
