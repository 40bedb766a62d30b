"""Subsets of one corpus and several prepared folders, in given proportions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anlit.data.mixture import Mixture
from anlit.data.module import TokenShards
from anlit.data.streams import ResumableLoader
from anlit.errors import UserError
from tests.data.modules import all_blocks, blocks_of, counted
from tests.data.prepared import random_tokens, write_prepared

LENGTH = 64
Subsets = tuple[str, dict[str, np.ndarray]]
Folders = tuple[dict[str, str], dict[str, np.ndarray]]


def ready(path: str | dict[str, str], batch_size: int = 8, **changes: Any) -> TokenShards:
    make = TokenShards if isinstance(path, str) else Mixture
    data = make(path, batch_size=batch_size, **{"context_length": LENGTH, **changes})
    data.setup()
    return data


def shares(loader: ResumableLoader, parts: dict[str, np.ndarray], n: int) -> dict[str, list[list[int]]]:
    """The blocks of the first `n` batches by the part that they are from."""
    owner = {tuple(block): name for name, tokens in parts.items() for block in all_blocks(tokens)}
    batches = [batch for batch, _ in zip((batch for _ in range(n) for batch in loader), range(n), strict=False)]
    seen: dict[str, list[list[int]]] = {name: [] for name in parts}
    for block in blocks_of(batches):
        seen[owner[tuple(block)]].append(block)
    return seen


def train_parts(tokens: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix("train/"): part for name, part in tokens.items() if name.startswith("train/")}


@pytest.mark.parametrize("shuffle", [True, False])
def test_without_weights_every_block_of_every_subset_comes_once(subsets: Subsets, shuffle: bool) -> None:
    path, tokens = subsets
    parts = train_parts(tokens)
    expected = [block for part in parts.values() for block in all_blocks(part)]
    loader = ready(path, 7, shuffle=shuffle).train_dataloader()
    assert len(loader) == len(expected) // 7 == 71
    seen = blocks_of([*loader, next(iter(loader))])[: len(expected)]
    assert sorted(seen) == sorted(expected)
    first = shares(ready(path, 7, shuffle=shuffle).train_dataloader(), parts, 20)
    assert all(abs(len(first[name]) - 140 * len(all_blocks(part)) / 498) < 15 for name, part in parts.items())
    assert shuffle or first["web"] == all_blocks(parts["web"])[: len(first["web"])]


@pytest.mark.parametrize("shuffle", [True, False])
def test_weights_of_subsets(subsets: Subsets, shuffle: bool) -> None:
    path, tokens = subsets
    weights = {"books": 3, "web": 1.0, "code": 0}
    parts = train_parts(tokens)
    loader = ready(path, shuffle=shuffle, weights=weights).train_dataloader()
    seen = shares(loader, parts, 1250)
    assert {name: len(blocks) for name, blocks in seen.items()} == {"books": 7500, "web": 2500, "code": 0}
    books = all_blocks(parts["books"])
    for first in range(0, 3 * len(books), len(books)):
        assert sorted(seen["books"][first : first + len(books)]) == sorted(books)
    assert len(loader) == (len(books) + len(all_blocks(parts["web"]))) // 8
    left_out, again = (
        blocks_of([next(iter(ready(path, shuffle=shuffle, weights=each).train_dataloader()))])
        for each in ({"books": 3, "web": 1}, weights)
    )
    assert left_out == again


def test_validation_goes_through_the_subsets_one_after_the_other(subsets: Subsets) -> None:
    path, tokens = subsets
    expected = [*tokens["val/web"][1:].tolist(), *tokens["val/books"][1:].tolist()]
    assert counted(ready(path, weights={"web": 1}).val_dataloader()) == expected
    assert counted(ready(path, 3, val_tokens=1600).val_dataloader()) == expected[:1600]


@pytest.mark.parametrize(
    ("weights", "changes", "complaint"),
    [
        ({"web": 1, "cod": 1, "book": 2}, {}, r"has cod, book and .* has web, code, books: choose among these"),
        ({"web": -1, "code": 2}, {}, r"weights of web is not a number from 0 up"),
        ({"web": float("nan"), "code": 2}, {}, r"weights of web is not a number from 0 up"),
        ({"web": 0, "code": 0}, {}, r"weights are all 0: give at least one of web, code, books a positive one"),
        ({}, {}, r"weights are all 0"),
        ({"web": 1, "code": 1e-6}, {}, r"weights has 1e-06, less than one sequence in 10,000"),
        ({"web": 1, "books": 1}, {"context_length": 3000, "batch_size": 1},
         r"context_length 3000 is too long for .*train/books, which has 3,000 tokens"),
    ],
)  # fmt: skip
def test_weights_that_make_no_sense(
    subsets: Subsets, weights: dict[str, float], changes: dict[str, int], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        ready(subsets[0], weights=weights, **changes)


def test_weights_without_subsets_and_subsets_without_a_block(prepared: str, subsets: Subsets) -> None:
    with pytest.raises(UserError, match=r"--data.weights is given and .* has no subsets: leave it out"):
        ready(prepared, weights={"web": 1})
    for weights in ({"web": 1, "books": 0}, None):
        ready(subsets[0], 1, context_length=3000, weights=weights)


@pytest.fixture
def folders(tmp_path: Path, subsets: Subsets) -> Folders:
    """A plain folder beside the one with subsets, by name, and the training tokens of each name."""
    plain = {"train": random_tokens(6_000, seed=70), "val": random_tokens(333, seed=71)}
    write_prepared(tmp_path / "plain", plain, corpus="other")
    inner = np.concatenate(list(train_parts(subsets[1]).values()))
    return {"slim": subsets[0], "plain": str(tmp_path / "plain")}, {"plain": plain["train"], "slim": inner}


def test_folders_by_weight(folders: Folders, subsets: Subsets) -> None:
    paths, tokens = folders
    data = ready(paths, weights={"plain": 1, "slim": 4})
    parts = {"plain": tokens["plain"], **train_parts(subsets[1])}
    seen = shares(data.train_dataloader(), parts, 1250)
    assert len(seen.pop("plain")) == 2000
    assert all(abs(len(seen[name]) - 8000 * len(all_blocks(parts[name])) / 498) < 60 for name in seen)
    assert data.bytes_per_token("val") == 3
    assert len(counted(data.val_dataloader())) == 332 + 1499 + 699


def test_folders_without_weights_and_the_order_of_their_names(folders: Folders) -> None:
    paths, _ = folders
    one, other = ready(paths), ready(dict(reversed(paths.items())))
    assert one.fingerprint == other.fingerprint
    loader = one.train_dataloader()
    assert len(loader) == (498 + 93) // 8
    assert blocks_of(list(loader)) == blocks_of(list(other.train_dataloader()))
    assert (one.fingerprint["tokens"], one.fingerprint["train"]["tokens"]) == (34_200 + 6_333, 32_000 + 6_000)
    assert set(one.fingerprint["parts"]) == {"plain", "slim"}
    alone = ready({"plain": paths["plain"]})
    assert alone.manifest["content_sha256"] != one.manifest["content_sha256"]


@pytest.mark.parametrize(("key", "value"), [("tokenizer_sha256", 64 * "a"), ("dtype", "int32"), ("end_of_document", 1)])
def test_folders_that_do_not_fit_together(folders: Folders, key: str, value: object) -> None:
    paths, _ = folders
    manifest = Path(paths["plain"], "manifest.json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), key: value}))
    with pytest.raises(UserError, match=rf"plain and .*subsets differ in {key} .*: mix only folders"):
        ready(paths)
