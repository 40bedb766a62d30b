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
from anlit.data.order import BlockOrder
from anlit.errors import UserError
from tests.data.modules import all_blocks, blocks_of, counted, ready
from tests.data.prepared import random_tokens, write_prepared
from tests.data.reader import edit

Corpus = tuple[str, dict[str, np.ndarray]]
"""A prepared folder, and the training tokens of its subsets."""
Folders = tuple[dict[str, str], dict[str, np.ndarray]]
CHUNK_BLOCKS = np.array([30, 0, 41, 17, 30, 25, 8, 33])
N_BLOCKS = int(CHUNK_BLOCKS.sum())


def make_order(window_blocks: int, seed: int = 3) -> BlockOrder:
    return BlockOrder([CHUNK_BLOCKS], True, seed, window_blocks)


def draw_blocks(order: BlockOrder, first: int, count: int) -> list[int]:
    _, blocks = order.draw(first, count)
    return blocks.tolist()


def chunks_of(blocks: Iterable[int]) -> np.ndarray:
    """Return the chunk in which each block begins."""
    return np.searchsorted(np.cumsum(CHUNK_BLOCKS), list(blocks), side="right")


@pytest.mark.parametrize("window", [1, 20, 60, 1000])
def test_passes_and_seeds_have_different_orders(window: int) -> None:
    first_pass = draw_blocks(make_order(window), 0, N_BLOCKS)
    second_pass = draw_blocks(make_order(window), N_BLOCKS, N_BLOCKS)
    other_seed = draw_blocks(make_order(window, seed=4), 0, N_BLOCKS)

    assert first_pass != second_pass
    assert other_seed not in (first_pass, second_pass)


@pytest.mark.parametrize("window", [1, 20, 60, 1000])
def test_a_draw_is_the_same_wherever_the_stream_is_entered(window: int) -> None:
    all_draws = draw_blocks(make_order(window), 0, 1000)
    used_order = make_order(window)
    rng = np.random.default_rng(0)
    for first in rng.integers(0, 700, 30).tolist():
        count = int(rng.integers(0, 300))
        for order in (make_order(window), used_order, pickle.loads(pickle.dumps(used_order))):
            assert draw_blocks(order, first, count) == all_draws[first : first + count]


def test_a_window_has_few_chunks() -> None:
    chunks = chunks_of(draw_blocks(make_order(60), 0, N_BLOCKS))

    n_open = np.zeros(N_BLOCKS, dtype=int)  # chunks that are in use at each draw
    for chunk in np.unique(chunks):
        draws = np.flatnonzero(chunks == chunk)
        n_open[draws[0] : draws[-1] + 1] += 1

    assert n_open.max() <= 4


def test_a_window_mixes_its_chunks() -> None:
    chunks = chunks_of(draw_blocks(make_order(60), 0, N_BLOCKS))
    assert (np.diff(chunks) != 0).mean() > 0.4

    chunks_in_one_window = chunks_of(draw_blocks(make_order(1000), 0, 40))
    assert set(chunks_in_one_window.tolist()) == {0, 2, 3, 4, 5, 6, 7}


ready_mixture = partial(ready, kind=Mixture)


def drawn_blocks(
    loader: ResumableLoader, tokens_by_name: dict[str, np.ndarray], n_batches: int
) -> dict[str, list[list[int]]]:
    """Return the blocks of the first batches by the name of their tokens."""
    names = {}
    for name, tokens in tokens_by_name.items():
        for block in all_blocks(tokens):
            names[tuple(block)] = name
    epochs = chain.from_iterable(repeat(loader))
    blocks_by_name: dict[str, list[list[int]]] = {name: [] for name in tokens_by_name}
    for block in blocks_of(islice(epochs, n_batches)):
        blocks_by_name[names[tuple(block)]].append(block)
    return blocks_by_name


@pytest.fixture
def corpus(subsets: Corpus) -> Corpus:
    path, streams = subsets
    return path, {name: streams[f"train/{name}"] for name in ("web", "code", "books")}


@pytest.mark.parametrize("shuffle", [True, False])
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

    assert len(loader) == len(expected) // 7 == 71
    blocks = blocks_of([*first_epoch, next_batch])
    assert sorted(blocks[: len(expected)]) == sorted(expected)


@pytest.mark.parametrize("shuffle", [True, False])
def test_without_weights_subsets_are_mixed_in_proportion_to_their_sizes(
    corpus: Corpus, shuffle: bool
) -> None:
    path, tokens_by_name = corpus
    loader = ready(path, batch_size=7, shuffle=shuffle).train_dataloader()

    blocks = drawn_blocks(loader, tokens_by_name, n_batches=20)

    for name, tokens in tokens_by_name.items():
        expected_count = 140 * len(all_blocks(tokens)) / 498
        assert abs(len(blocks[name]) - expected_count) < 15
    if not shuffle:
        assert blocks["web"] == all_blocks(tokens_by_name["web"])[: len(blocks["web"])]


@pytest.mark.parametrize("shuffle", [True, False])
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
    for first in range(0, 3 * len(books), len(books)):  # three passes
        assert sorted(blocks["books"][first : first + len(books)]) == sorted(books)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_subset_without_a_weight_is_left_out(corpus: Corpus, shuffle: bool) -> None:
    path, tokens_by_name = corpus
    blocks = []
    for weights in ({"books": 3, "web": 1, "code": 0}, {"books": 3, "web": 1}):
        data = ready(path, batch_size=8, shuffle=shuffle, weights=weights)
        blocks.append(drawn_blocks(data.train_dataloader(), tokens_by_name, n_batches=1250))

    assert blocks[0] == blocks[1]


@pytest.mark.parametrize(
    ("weights", "settings", "message"),
    [
        (
            {"web": 1, "cod": 1, "book": 2},
            {},
            r"has cod, book and .* has web, code, books: choose among these",
        ),
        ({"web": float("nan"), "code": 2}, {}, "weights of web is not a number from 0 up"),
        (
            {"web": 0, "code": 0},
            {},
            "weights are all 0: give a positive weight to one of web, code, books",
        ),
        ({"web": 1, "code": 1e-6}, {}, "weights has 1e-06, less than one sequence in 10,000"),
        (
            {"web": 1, "books": 1},
            {"context_length": 3000, "batch_size": 1},
            r"context_length 3000 is too long for .*train/books, which has 3,000 tokens",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    subsets: Corpus, weights: Any, settings: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        ready(subsets[0], weights=weights, **settings)


def test_weights_for_a_corpus_without_subsets_are_refused(prepared: str) -> None:
    message = r"--data.weights is set and .* has no subsets: leave it out"

    with pytest.raises(UserError, match=message):
        ready(prepared, weights={"web": 1})


@pytest.mark.parametrize("weights", [{"web": 1, "books": 0}, None])
def test_a_subset_without_a_block_is_accepted_if_no_weight_needs_it(
    subsets: Corpus, weights: Any
) -> None:
    ready(subsets[0], batch_size=1, context_length=3000, weights=weights)


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
        expected_count = 8000 * len(all_blocks(tokens_by_name[name])) / 498
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
    assert len(blocks) == (498 + 93) // 4 * 4


def test_the_fingerprint_of_a_mixture_has_the_sums_of_its_folders(folders: Folders) -> None:
    fingerprint = ready_mixture(folders[0]).fingerprint

    assert fingerprint["tokens"] == 34_200 + 6_333
    assert fingerprint["train"]["tokens"] == 32_000 + 6_000
    assert set(fingerprint["parts"]) == {"plain", "slim"}


@pytest.mark.parametrize(("key", "value"), [("tokenizer_sha256", 64 * "a"), ("end_of_document", 1)])
def test_folders_that_do_not_fit_together_are_refused(
    folders: Folders, key: str, value: object
) -> None:
    paths, _ = folders
    edit(Path(paths["plain"], "manifest.json"), lambda manifest: manifest.update({key: value}))

    message = rf"plain and .*subsets differ in {key} .*: mix only folders"
    with pytest.raises(UserError, match=message):
        ready_mixture(paths)


def test_a_mixture_without_folders_is_refused() -> None:
    with pytest.raises(UserError, match="names no folder"):
        ready_mixture({})
