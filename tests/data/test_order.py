"""The order of the data, random in windows and the same from wherever it is entered, and parts in given proportions.

That a pass has every block once is tested in test_resume.py, and that the order never changes in tests/golden.
"""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anlit.data.mixture import Mixture
from anlit.data.order import BlockOrder
from anlit.data.streams import ResumableLoader
from anlit.errors import UserError
from tests.data.modules import all_blocks, blocks_of, counted, ready
from tests.data.prepared import random_tokens, write_prepared
from tests.data.reader import edit

Subsets = tuple[str, dict[str, np.ndarray]]
Folders = tuple[dict[str, str], dict[str, np.ndarray]]
CHUNKS = np.array([30, 0, 41, 17, 30, 25, 8, 33])


def order_of(window_blocks: int, seed: int = 3) -> BlockOrder:
    return BlockOrder([CHUNKS], True, seed, window_blocks)


@pytest.mark.parametrize("window", [1, 20, 60, 1000])
def test_a_draw_is_the_same_wherever_the_stream_is_entered(window: int) -> None:
    whole, used, n = order_of(window).draw(0, 1000)[1], order_of(window), int(CHUNKS.sum())
    assert (
        len(
            {
                each.tobytes()
                for each in (whole[:n], whole[n : 2 * n], order_of(window, 4).draw(0, n)[1])
            }
        )
        == 3
    )
    rng = np.random.default_rng(0)
    for first in rng.integers(0, 700, 30).tolist():
        count = int(rng.integers(0, 300))
        for order in (order_of(window), used, pickle.loads(pickle.dumps(used))):
            assert np.array_equal(order.draw(first, count)[1], whole[first : first + count])


def test_a_window_has_few_chunks_and_mixes_them() -> None:
    order = order_of(60)
    chunks = np.searchsorted(np.cumsum(CHUNKS), order.draw(0, order.n_blocks)[1], side="right")
    ends = [np.flatnonzero(chunks == chunk)[[0, -1]] for chunk in np.unique(chunks)]
    assert (
        max(sum(first <= draw <= last for first, last in ends) for draw in range(order.n_blocks))
        <= 4
    )
    assert np.abs(np.diff(chunks)).astype(bool).mean() > 0.4
    mixed = np.searchsorted(np.cumsum(CHUNKS), order_of(1000).draw(0, 40)[1], side="right")
    assert set(mixed.tolist()) == {0, 2, 3, 4, 5, 6, 7}


mixed = partial(ready, kind=Mixture)


def shares(
    loader: ResumableLoader, parts: dict[str, np.ndarray], n: int
) -> dict[str, list[list[int]]]:
    """The blocks of the first `n` batches by the part that they are from."""
    owner = {tuple(block): name for name, tokens in parts.items() for block in all_blocks(tokens)}
    batches = [
        batch
        for batch, _ in zip((batch for _ in range(n) for batch in loader), range(n), strict=False)
    ]
    seen: dict[str, list[list[int]]] = {name: [] for name in parts}
    for block in blocks_of(batches):
        seen[owner[tuple(block)]].append(block)
    return seen


@pytest.fixture
def corpus(subsets: Subsets) -> Subsets:
    """The folder of the corpus with subsets, and their training tokens."""
    return subsets[0], {name: subsets[1][f"train/{name}"] for name in ("web", "code", "books")}


@pytest.mark.parametrize("shuffle", [True, False])
def test_without_weights_every_block_of_every_subset_comes_once(
    corpus: Subsets, shuffle: bool
) -> None:
    path, parts = corpus
    expected = [block for part in parts.values() for block in all_blocks(part)]
    loader = ready(path, batch_size=7, shuffle=shuffle).train_dataloader()
    assert len(loader) == len(expected) // 7 == 71
    assert sorted(blocks_of([*loader, next(iter(loader))])[: len(expected)]) == sorted(expected)
    first = shares(ready(path, batch_size=7, shuffle=shuffle).train_dataloader(), parts, 20)
    assert all(
        abs(len(first[name]) - 140 * len(all_blocks(part)) / 498) < 15
        for name, part in parts.items()
    )
    assert shuffle or first["web"] == all_blocks(parts["web"])[: len(first["web"])]


@pytest.mark.parametrize("shuffle", [True, False])
def test_weights_of_subsets(corpus: Subsets, shuffle: bool) -> None:
    path, parts = corpus
    loaders = [
        ready(path, batch_size=8, shuffle=shuffle, weights=weights).train_dataloader()
        for weights in ({"books": 3, "web": 1.0, "code": 0}, {"books": 3, "web": 1})
    ]
    seen, left_out = (shares(loader, parts, 1250) for loader in loaders)
    assert seen == left_out
    assert {name: len(blocks) for name, blocks in seen.items()} == {
        "books": 7500,
        "web": 2500,
        "code": 0,
    }
    books = all_blocks(parts["books"])
    for first in range(0, 3 * len(books), len(books)):
        assert sorted(seen["books"][first : first + len(books)]) == sorted(books)
    assert len(loaders[0]) == (len(books) + len(all_blocks(parts["web"]))) // 8


@pytest.mark.parametrize(("weights", "changes", "complaint"), [
    ({"web": 1, "cod": 1, "book": 2}, {}, r"has cod, book and .* has web, code, books: choose among these"),
    ({"web": float("nan"), "code": 2}, {}, r"weights of web is not a number from 0 up"),
    ({"web": 0, "code": 0}, {}, r"weights are all 0: give at least one of web, code, books a positive one"),
    ({"web": 1, "code": 1e-6}, {}, r"weights has 1e-06, less than one sequence in 10,000"),
    ({"web": 1, "books": 1}, {"context_length": 3000, "batch_size": 1},
     r"context_length 3000 is too long for .*train/books, which has 3,000 tokens"),
])  # fmt: skip
def test_weights_that_make_no_sense(
    subsets: Subsets, weights: Any, changes: Any, complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        ready(subsets[0], weights=weights, **changes)


def test_weights_without_subsets_and_subsets_without_a_block(
    prepared: str, subsets: Subsets
) -> None:
    with pytest.raises(
        UserError, match=r"--data.weights is given and .* has no subsets: leave it out"
    ):
        ready(prepared, weights={"web": 1})
    for weights in ({"web": 1, "books": 0}, None):
        ready(subsets[0], batch_size=1, context_length=3000, weights=weights)


@pytest.fixture
def folders(tmp_path: Path, corpus: Subsets) -> Folders:
    """A plain folder beside the one with subsets, and the training tokens of each part."""
    plain = {"train": random_tokens(6_000, seed=70), "val": random_tokens(333, seed=71)}
    write_prepared(tmp_path / "plain", plain, corpus="other")
    return {"slim": corpus[0], "plain": str(tmp_path / "plain")}, {
        "plain": plain["train"],
        **corpus[1],
    }


def test_folders_by_weight(folders: Folders) -> None:
    paths, parts = folders
    data = mixed(paths, batch_size=8, weights={"plain": 1, "slim": 4})
    seen = shares(data.train_dataloader(), parts, 1250)
    assert len(seen.pop("plain")) == 2000
    assert all(
        abs(len(seen[name]) - 8000 * len(all_blocks(parts[name])) / 498) < 60 for name in seen
    )
    assert data.bytes_per_token("val") == 3
    assert len(counted(data.val_dataloader())) == 332 + 1499 + 699


def test_folders_without_weights_and_the_order_of_their_names(folders: Folders) -> None:
    one, other = mixed(folders[0]), mixed(dict(reversed(folders[0].items())))
    assert one.fingerprint == other.fingerprint
    loader = one.train_dataloader()
    assert len(loader) == (498 + 93) // 4
    assert blocks_of(list(loader)) == blocks_of(list(other.train_dataloader()))
    assert (one.fingerprint["tokens"], one.fingerprint["train"]["tokens"]) == (
        34_200 + 6_333,
        32_000 + 6_000,
    )
    assert set(one.fingerprint["parts"]) == {"plain", "slim"}


@pytest.mark.parametrize(("key", "value"), [("tokenizer_sha256", 64 * "a"), ("end_of_document", 1)])
def test_folders_that_do_not_fit_together(folders: Folders, key: str, value: object) -> None:
    edit(Path(folders[0]["plain"], "manifest.json"), lambda manifest: manifest.update({key: value}))
    with pytest.raises(
        UserError, match=rf"plain and .*subsets differ in {key} .*: mix only folders"
    ):
        mixed(folders[0])
    with pytest.raises(UserError, match="names no folder"):
        mixed({})
