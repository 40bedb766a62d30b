"""Subsets of one corpus and several prepared folders, in given proportions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anlit.data.mixture import Mixture
from anlit.data.module import TokenShards
from anlit.data.order.loader import Loader, ResumableLoader
from anlit.errors import UserError
from anlit.targets import IGNORED
from tests.data.modules import all_blocks, blocks_of
from tests.data.prepared import random_tokens, write_prepared

LENGTH = 64
Subsets = tuple[str, dict[str, np.ndarray]]


def ready(data: TokenShards) -> TokenShards:
    data.setup()
    return data


def shares(loader: ResumableLoader, parts: dict[str, np.ndarray], n: int) -> dict[str, list[list[int]]]:
    """The blocks of the first `n` batches by the part that they are from."""
    owner = {tuple(block): name for name, tokens in parts.items() for block in all_blocks(tokens)}
    batches = [batch for batch, _ in zip(endless(loader), range(n), strict=False)]
    seen: dict[str, list[list[int]]] = {name: [] for name in parts}
    for block in blocks_of(batches):
        seen[owner[tuple(block)]].append(block)
    return seen


def endless(loader: ResumableLoader) -> Any:
    while True:
        yield from loader


def train_parts(tokens: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix("train/"): part for name, part in tokens.items() if name.startswith("train/")}


def validated(loader: Loader) -> list[int]:
    targets = torch.cat([batch.targets.flatten() for batch in loader])
    return targets[targets != IGNORED].tolist()


@pytest.mark.parametrize("shuffle", [True, False])
def test_without_weights_every_block_of_every_subset_comes_once(subsets: Subsets, shuffle: bool) -> None:
    path, tokens = subsets
    parts = train_parts(tokens)
    expected = [block for part in parts.values() for block in all_blocks(part)]
    loader = ready(TokenShards(path, 7, LENGTH, shuffle=shuffle)).train_dataloader()
    assert len(loader) == len(expected) // 7 == 71
    assert len(expected) % 7 == 1
    seen = blocks_of([*loader, next(iter(loader))])[: len(expected)]
    assert sorted(seen) == sorted(expected)
    first = shares(ready(TokenShards(path, 7, LENGTH, shuffle=shuffle)).train_dataloader(), parts, 20)
    assert all(abs(len(first[name]) - 140 * len(all_blocks(part)) / 498) < 15 for name, part in parts.items())
    if not shuffle:
        assert first["web"] == all_blocks(parts["web"])[: len(first["web"])]


@pytest.mark.parametrize("shuffle", [True, False])
def test_weights_of_subsets(subsets: Subsets, shuffle: bool) -> None:
    path, tokens = subsets
    weights = {"books": 3, "web": 1.0, "code": 0}
    parts = train_parts(tokens)
    loader = ready(TokenShards(path, 8, LENGTH, shuffle=shuffle, weights=weights)).train_dataloader()
    seen = shares(loader, parts, 1250)
    assert {name: len(blocks) for name, blocks in seen.items()} == {"books": 7500, "web": 2500, "code": 0}
    n_books = len(all_blocks(parts["books"]))
    for number in range(3):
        one_pass = seen["books"][number * n_books : (number + 1) * n_books]
        assert sorted(one_pass) == sorted(all_blocks(parts["books"]))
    assert len(loader) == (n_books + len(all_blocks(parts["web"]))) // 8
    left_out = ready(TokenShards(path, 8, LENGTH, shuffle=shuffle, weights={"books": 3, "web": 1})).train_dataloader()
    again = ready(TokenShards(path, 8, LENGTH, shuffle=shuffle, weights=weights)).train_dataloader()
    assert blocks_of([next(iter(left_out))]) == blocks_of([next(iter(again))])


def test_validation_goes_through_the_subsets_one_after_the_other(subsets: Subsets) -> None:
    path, tokens = subsets
    data = ready(TokenShards(path, 8, LENGTH, weights={"web": 1}))
    expected = [*tokens["val/web"][1:].tolist(), *tokens["val/books"][1:].tolist()]
    assert validated(data.val_dataloader()) == expected
    assert validated(ready(TokenShards(path, 3, LENGTH, val_tokens=1600)).val_dataloader()) == expected[:1600]


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [
        ({"web": 1, "cod": 1, "book": 2}, r"has cod, book and .* has web, code, books: choose among these"),
        ({"web": -1, "code": 2}, r"weights of web is not a number from 0 up"),
        ({"web": float("nan"), "code": 2}, r"weights of web is not a number from 0 up"),
        ({"web": 0, "code": 0}, r"weights are all 0: give at least one of web, code, books a positive one"),
        ({}, r"weights are all 0"),
        ({"web": 1, "code": 1e-6}, r"weights has 1e-06, less than one sequence in 10,000"),
    ],
)
def test_weights_that_make_no_sense(subsets: Subsets, weights: dict[str, float], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        ready(TokenShards(subsets[0], 4, LENGTH, weights=weights))


def test_weights_without_subsets_and_subsets_without_a_block(prepared: str, subsets: Subsets) -> None:
    with pytest.raises(UserError, match=r"--data.weights is given and .* has no subsets: leave it out"):
        ready(TokenShards(prepared, 4, LENGTH, weights={"web": 1}))
    with pytest.raises(UserError, match=r"context_length 3000 is too long for .*train/books, which has 3,000 tokens"):
        ready(TokenShards(subsets[0], 1, 3000, weights={"web": 1, "books": 1}))
    ready(TokenShards(subsets[0], 1, 3000, weights={"web": 1, "books": 0}))
    ready(TokenShards(subsets[0], 1, 3000))


@pytest.fixture
def folders(tmp_path: Path, subsets: Subsets) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """A plain folder beside the one with subsets, by name, and the training tokens of each name."""
    plain = {"train": random_tokens(6_000, seed=70), "val": random_tokens(333, seed=71)}
    write_prepared(tmp_path / "plain", plain, corpus="other")
    inner = np.concatenate(list(train_parts(subsets[1]).values()))
    return {"slim": subsets[0], "plain": str(tmp_path / "plain")}, {"plain": plain["train"], "slim": inner}


def test_folders_by_weight(folders: tuple[dict[str, str], dict[str, np.ndarray]], subsets: Subsets) -> None:
    paths, tokens = folders
    data = ready(Mixture(paths, batch_size=8, context_length=LENGTH, weights={"plain": 1, "slim": 4}))
    parts = {"plain": tokens["plain"], **train_parts(subsets[1])}
    seen = shares(data.train_dataloader(), parts, 1250)
    assert len(seen.pop("plain")) == 2000
    assert sum(map(len, seen.values())) == 8000
    in_proportion = {name: 8000 * len(all_blocks(parts[name])) / 498 for name in seen}
    assert all(abs(len(seen[name]) - in_proportion[name]) < 60 for name in seen)
    assert data.bytes_per_token("val") == 3
    assert len(validated(data.val_dataloader())) == 332 + 1499 + 699


def test_folders_without_weights_and_the_order_of_their_names(
    folders: tuple[dict[str, str], dict[str, np.ndarray]],
) -> None:
    paths, _ = folders
    one = ready(Mixture(paths, batch_size=8, context_length=LENGTH))
    other = ready(Mixture(dict(reversed(paths.items())), batch_size=8, context_length=LENGTH))
    assert one.fingerprint == other.fingerprint
    loader = one.train_dataloader()
    assert len(loader) == (498 + 93) // 8
    assert blocks_of(list(loader)) == blocks_of(list(other.train_dataloader()))
    assert one.fingerprint["tokens"] == 34_200 + 6_333
    assert one.fingerprint["train"]["tokens"] == 32_000 + 6_000
    assert set(one.fingerprint["parts"]) == {"plain", "slim"}
    alone = ready(Mixture({"plain": paths["plain"]}, batch_size=8, context_length=LENGTH))
    assert alone.manifest["content_sha256"] != one.manifest["content_sha256"]


@pytest.mark.parametrize(("key", "value"), [("tokenizer_sha256", 64 * "a"), ("dtype", "int32"), ("end_of_document", 1)])
def test_folders_that_do_not_fit_together(
    folders: tuple[dict[str, str], dict[str, np.ndarray]], key: str, value: object
) -> None:
    paths, _ = folders
    manifest = Path(paths["plain"], "manifest.json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), key: value}))
    with pytest.raises(UserError, match=rf"plain and .*subsets differ in {key} .*: mix only folders"):
        ready(Mixture(paths, batch_size=8, context_length=LENGTH))
