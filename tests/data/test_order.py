"""The order of the data: random in windows, the same from every entry, with fixed proportions.

test_resume.py tests that a pass has every block once; tests/golden tests that the order never
changes.
"""

import pickle
from collections.abc import Iterable
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anlit.data.loaders import ResumableLoader
from anlit.data.mixture import Mixture
from anlit.data.order import BlockOrder, deal_evenly
from anlit.errors import UserError
from tests.data.modules import all_blocks, blocks_of, counted, ready
from tests.data.prepared import random_tokens, write_prepared
from tests.data.reader import edit

Corpus = tuple[str, dict[str, np.ndarray]]
"""A prepared folder, and the training tokens of its subsets."""
Blocks = list[list[int]]
Folders = tuple[dict[str, str], dict[str, np.ndarray]]
CHUNK_BLOCKS = np.array([30, 0, 41, 17, 30, 25, 8, 33])
N_BLOCKS = int(CHUNK_BLOCKS.sum())
N_CORPUS_BLOCKS = 498
"""Blocks in the training splits of the subsets."""
each_window = pytest.mark.parametrize("window", [1, 20, 60, 1000])
shuffled_or_not = pytest.mark.parametrize("shuffle", [True, False])


def make_order(window_blocks: int, seed: int = 3) -> BlockOrder:
    return BlockOrder([CHUNK_BLOCKS], True, seed, window_blocks)


def draw_blocks(order: BlockOrder, first: int, count: int) -> list[int]:
    _, blocks = order.draw(first, count)
    return blocks.tolist()


def chunks_of(blocks: Iterable[int]) -> np.ndarray:
    """Return the chunk in which each block begins."""
    return np.searchsorted(np.cumsum(CHUNK_BLOCKS), list(blocks), side="right")


@each_window
def test_passes_and_seeds_have_different_orders(window: int) -> None:
    first_pass = draw_blocks(make_order(window), 0, N_BLOCKS)
    second_pass = draw_blocks(make_order(window), N_BLOCKS, N_BLOCKS)
    other_seed = draw_blocks(make_order(window, seed=4), 0, N_BLOCKS)

    assert first_pass != second_pass
    assert other_seed not in (first_pass, second_pass)


@each_window
def test_a_draw_is_the_same_wherever_the_stream_is_entered(window: int) -> None:
    all_draws = draw_blocks(make_order(window), 0, 1000)
    used_order = make_order(window)
    rng = np.random.default_rng(0)
    for first in rng.integers(0, 700, 30).tolist():
        count = int(rng.integers(0, 300))
        expected = all_draws[first : first + count]
        pickled_order = pickle.loads(pickle.dumps(used_order))

        assert draw_blocks(make_order(window), first, count) == expected
        assert draw_blocks(used_order, first, count) == expected
        assert draw_blocks(pickled_order, first, count) == expected


def test_a_window_has_few_chunks() -> None:
    chunks = chunks_of(draw_blocks(make_order(60), 0, N_BLOCKS))

    n_open = np.zeros(N_BLOCKS, dtype=int)  # chunks that are in use at each draw
    for chunk in np.unique(chunks):
        draws = np.flatnonzero(chunks == chunk)
        n_open[draws[0] : draws[-1] + 1] += 1

    assert n_open.max() <= 4


def test_a_window_mixes_its_chunks() -> None:
    chunks = chunks_of(draw_blocks(make_order(60), 0, N_BLOCKS))
    share_of_changes = (np.diff(chunks) != 0).mean()
    assert share_of_changes > 0.4

    first_blocks = draw_blocks(make_order(1000), 0, 40)
    assert set(chunks_of(first_blocks)) == {0, 2, 3, 4, 5, 6, 7}


ready_mixture = partial(ready, kind=Mixture)


def drawn_blocks(
    loader: ResumableLoader, tokens_by_name: dict[str, np.ndarray], n_batches: int
) -> dict[str, Blocks]:
    """Return the blocks of the first batches by the name of their tokens."""
    name_of_block = {}
    for name, tokens in tokens_by_name.items():
        for block in all_blocks(tokens):
            name_of_block[tuple(block)] = name
    epochs = chain.from_iterable(repeat(loader))
    first_batches = islice(epochs, n_batches)
    blocks_by_name: dict[str, Blocks] = {name: [] for name in tokens_by_name}
    for block in blocks_of(first_batches):
        name = name_of_block[tuple(block)]
        blocks_by_name[name].append(block)
    return blocks_by_name


@pytest.fixture
def corpus(subsets: Corpus) -> Corpus:
    path, streams = subsets
    return path, {name: streams[f"train/{name}"] for name in ("web", "code", "books")}


@shuffled_or_not
def test_without_weights_every_block_of_every_subset_comes_once(
    corpus: Corpus, shuffle: bool
) -> None:
    path, tokens_by_name = corpus
    expected = []
    for tokens in tokens_by_name.values():
        expected += all_blocks(tokens)

    loader = ready(path, batch_size=7, shuffle=shuffle).train_dataloader()
    first_epoch = list(loader)
    next_batch = next(iter(loader))

    assert len(expected) == N_CORPUS_BLOCKS
    assert len(loader) == N_CORPUS_BLOCKS // 7
    blocks = blocks_of([*first_epoch, next_batch])
    assert sorted(blocks[: len(expected)]) == sorted(expected)


@shuffled_or_not
def test_without_weights_subsets_are_mixed_in_proportion_to_their_sizes(
    corpus: Corpus, shuffle: bool
) -> None:
    path, tokens_by_name = corpus
    loader = ready(path, batch_size=7, shuffle=shuffle).train_dataloader()

    blocks = drawn_blocks(loader, tokens_by_name, n_batches=20)

    for name, tokens in tokens_by_name.items():
        expected_count = 140 * len(all_blocks(tokens)) / N_CORPUS_BLOCKS
        assert abs(len(blocks[name]) - expected_count) < 15
    if not shuffle:
        web = all_blocks(tokens_by_name["web"])
        assert blocks["web"] == web[: len(blocks["web"])]


@shuffled_or_not
def test_weights_decide_how_often_a_subset_is_drawn(corpus: Corpus, shuffle: bool) -> None:
    path, tokens_by_name = corpus
    books = all_blocks(tokens_by_name["books"])
    web = all_blocks(tokens_by_name["web"])
    weights = {"books": 3, "web": 1.0, "code": 0}
    loader = ready(path, batch_size=8, shuffle=shuffle, weights=weights).train_dataloader()

    blocks = drawn_blocks(loader, tokens_by_name, n_batches=1250)

    counts = {name: len(blocks_of_name) for name, blocks_of_name in blocks.items()}
    assert counts == {"books": 7500, "web": 2500, "code": 0}
    assert len(loader) == (len(books) + len(web)) // 8
    for number in range(3):
        first = number * len(books)
        one_pass = blocks["books"][first : first + len(books)]
        assert sorted(one_pass) == sorted(books)


@shuffled_or_not
def test_a_subset_without_a_weight_is_left_out(corpus: Corpus, shuffle: bool) -> None:
    path, tokens_by_name = corpus

    def first_blocks(weights: dict[str, int]) -> dict[str, Blocks]:
        data = ready(path, batch_size=8, shuffle=shuffle, weights=weights)
        return drawn_blocks(data.train_dataloader(), tokens_by_name, n_batches=1250)

    without_weight = first_blocks({"books": 3, "web": 1})
    with_weight_0 = first_blocks({"books": 3, "web": 1, "code": 0})

    assert without_weight == with_weight_0
    assert without_weight["code"] == []


SIZES_OF_TRILLIONS = [5_000_000_000, 1_999_999_999, 3]
"""Blocks of 2,048 tokens in the subsets of a corpus of 14 trillion tokens."""


def test_subsets_of_trillions_of_tokens_are_dealt_out_by_exact_numbers() -> None:
    """After any number of draws, a subset has had its share of them, up to two draws."""
    total = sum(SIZES_OF_TRILLIONS)
    for first in (0, 10**9, 3 * 10**9, total - 1000):
        draws = np.arange(first, first + 1000)

        arrays, earlier_draws = deal_evenly(draws, SIZES_OF_TRILLIONS)

        for array, size in enumerate(SIZES_OF_TRILLIONS):
            is_drawn = arrays == array
            shares = [draw * size // total for draw in draws[is_drawn].tolist()]
            assert np.abs(earlier_draws[is_drawn] - np.array(shares)).max(initial=0) <= 2
            assert (np.diff(earlier_draws[is_drawn]) == 1).all()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            {"web": 1, "cod": 1, "book": 2},
            r"has cod, book and .* has web, code, books: choose among these",
        ),
        ({"web": float("nan"), "code": 2}, "weights of web is not a number from 0 up"),
        (
            {"web": 0, "code": 0},
            "weights are all 0: give a positive weight to one of web, code, books",
        ),
        ({"web": 1, "code": 1e-6}, "weights has 1e-06, less than one sequence in 10,000"),
    ],
    ids=["unknown names", "not a number", "all 0", "too small"],
)
def test_weights_that_do_not_fit_are_refused(
    subsets: Corpus, weights: dict[str, float], message: str
) -> None:
    path, _ = subsets

    with pytest.raises(UserError, match=message):
        ready(path, weights=weights)


def test_a_context_longer_than_a_subset_with_a_weight_is_refused(subsets: Corpus) -> None:
    path, _ = subsets

    message = r"context_length 3000 is too long for .*train/books, which has 3,000 tokens"
    with pytest.raises(UserError, match=message):
        ready(path, weights={"web": 1, "books": 1}, context_length=3000, batch_size=1)


def test_weights_for_a_corpus_without_subsets_are_refused(prepared: str) -> None:
    message = r"--data.weights is set and .* has no subsets: leave it out"

    with pytest.raises(UserError, match=message):
        ready(prepared, weights={"web": 1})


@pytest.mark.parametrize("weights", [{"web": 1, "books": 0}, None])
def test_a_subset_without_a_block_is_accepted_if_no_weight_needs_it(
    subsets: Corpus, weights: Any
) -> None:
    path, _ = subsets

    ready(path, batch_size=1, context_length=3000, weights=weights)


@pytest.fixture
def folders(tmp_path: Path, corpus: Corpus) -> Folders:
    """The corpus with subsets and a plain folder, and all their training tokens."""
    path, tokens_by_name = corpus
    plain = {"train": random_tokens(6_000, seed=70), "val": random_tokens(333, seed=71)}
    write_prepared(tmp_path / "plain", plain, corpus="other")
    paths = {"slim": path, "plain": str(tmp_path / "plain")}
    return paths, {"plain": plain["train"], **tokens_by_name}


def test_weights_decide_how_often_a_folder_is_drawn(folders: Folders) -> None:
    paths, tokens_by_name = folders
    data = ready_mixture(paths, batch_size=8, weights={"plain": 1, "slim": 4})

    blocks = drawn_blocks(data.train_dataloader(), tokens_by_name, n_batches=1250)

    assert len(blocks.pop("plain")) == 2000
    for name, blocks_of_subset in blocks.items():
        expected_count = 8000 * len(all_blocks(tokens_by_name[name])) / N_CORPUS_BLOCKS
        assert abs(len(blocks_of_subset) - expected_count) < 60
    assert data.bytes_per_token("val") == 3
    assert len(counted(data.val_dataloader())) == 332 + 1499 + 699


def test_the_order_of_the_folders_names_decides_nothing(folders: Folders) -> None:
    paths, _ = folders
    data = ready_mixture(paths)
    reversed_data = ready_mixture(dict(reversed(paths.items())))

    blocks = blocks_of(data.train_dataloader())

    assert data.fingerprint == reversed_data.fingerprint
    assert blocks == blocks_of(reversed_data.train_dataloader())
    n_plain_blocks = 93
    n_batches = (N_CORPUS_BLOCKS + n_plain_blocks) // 4
    assert len(blocks) == 4 * n_batches


def test_the_fingerprint_of_a_mixture_has_the_sums_of_its_folders(folders: Folders) -> None:
    paths, _ = folders

    fingerprint = ready_mixture(paths).fingerprint

    assert fingerprint["tokens"] == 34_200 + 6_333
    assert fingerprint["train"]["tokens"] == 32_000 + 6_000
    assert set(fingerprint["parts"]) == {"plain", "slim"}


@pytest.mark.parametrize(("key", "value"), [("tokenizer_sha256", 64 * "a"), ("end_of_document", 1)])
def test_folders_that_do_not_fit_together_are_refused(
    folders: Folders, key: str, value: object
) -> None:
    paths, _ = folders
    manifest_path = Path(paths["plain"], "manifest.json")
    edit(manifest_path, lambda manifest: manifest.update({key: value}))

    message = rf"plain and .*subsets differ in {key} .*: mix only folders"
    with pytest.raises(UserError, match=message):
        ready_mixture(paths)


def test_a_mixture_without_folders_is_refused() -> None:
    with pytest.raises(UserError, match="names no folder"):
        ready_mixture({})
