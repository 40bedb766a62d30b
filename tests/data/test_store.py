"""Chunks read as one array, and what is said when they are not what the index says."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from anlit.data.storage import shards, store
from anlit.data.storage.manifest import read_manifest
from anlit.data.storage.store import TokenStore
from anlit.errors import UserError
from tests.data.prepared import random_tokens, write_prepared
from tests.data.processes import finish, start
from tests.data.reader import flip


def open_store(path: Path) -> TokenStore:
    return TokenStore(shards.read_sources(str(path), read_manifest(str(path)))["train"][0])


@pytest.fixture(params=[np.uint16, np.int32])
def tokens(request) -> np.ndarray:
    high = 65_536 if request.param is np.uint16 else 200_000
    return random_tokens(5_000, seed=0, vocabulary=high, dtype=request.param)


@pytest.fixture
def folder(tmp_path: Path, tokens: np.ndarray) -> Path:
    write_prepared(tmp_path / "own", {"train": tokens, "val": tokens[:100]}, chunk_tokens=777)
    return tmp_path / "own"


def test_any_part_of_the_array_across_chunks(folder: Path, tokens: np.ndarray) -> None:
    reader = open_store(folder)
    for first, count in [
        (0, 5000),
        (0, 777),
        (776, 2),
        (777, 777),
        (1553, 1700),
        (4999, 1),
        (5000, 0),
        (10, 0),
    ]:
        part = reader.read(first, count)
        assert part.dtype == tokens.dtype
        assert np.array_equal(part, tokens[first : first + count])
    blocks = np.array([12, 0, 7, 48])  # neighbours share a token
    expected = [tokens[block * 100 : block * 100 + 101] for block in blocks]
    assert np.array_equal(reader.read_blocks(blocks, 100), expected)


def test_a_store_works_on_in_another_process(folder: Path, tokens: np.ndarray, monkeypatch) -> None:
    monkeypatch.setattr(store, "OPEN_FILES", 2)
    reader = open_store(folder)
    reader.read(0, 5000)
    assert len(reader._open) == 2
    assert np.array_equal(pickle.loads(pickle.dumps(reader)).read(700, 900), tokens[700:1600])
    assert (
        finish(
            start(lambda: np.testing.assert_array_equal(reader.read(700, 900), tokens[700:1600]))
        )
        == 0
    )
    assert np.array_equal(reader.read(3000, 900), tokens[3000:3900])


def test_each_chunk_is_checked_once(folder: Path, monkeypatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(store, "OPEN_FILES", 1)
    monkeypatch.setattr(store, "problem_with", lambda _, chunk: checked.append(chunk.filename))
    reader = open_store(folder)
    for _ in range(2):
        reader.read(0, 2000)
    assert checked == ["chunk-0-0.bin", "chunk-0-1.bin", "chunk-0-2.bin"]


@pytest.mark.parametrize("at_once", [100, 1 << 20])
def test_chunks_that_are_damaged_vanish_or_shrink_while_training(
    folder: Path, at_once: int, monkeypatch
) -> None:
    monkeypatch.setattr(shards, "CHECKED_AT_ONCE", at_once)
    reader, chunks = (
        open_store(folder),
        [folder / "train" / f"chunk-0-{number}.bin" for number in range(4)],
    )
    reader.read(0, 777)
    os.truncate(chunks[0], 60)
    os.truncate(chunks[1], 60)
    chunks[2].unlink()
    flip(chunks[3])
    says = [
        "it ends .* bytes too soon",
        "it has 60 bytes instead of .*",
        "it is missing",
        "its CRC-32 is .*",
    ]
    for number, how in enumerate(says):
        said = rf"chunk-0-{number}.bin is damaged \({how}\): .*remake it with `anlit prepare Test --path data/test`"
        with pytest.raises(UserError, match=said):
            reader.read(777 * number, 777)


def test_a_failing_disk(folder: Path, monkeypatch) -> None:
    reader = open_store(folder)
    monkeypatch.setattr(os, "preadv", lambda *arguments: os.stat("/none"))
    with pytest.raises(
        UserError,
        match=r"chunk-0-1.bin is damaged \(it cannot be read: No such file or directory\)",
    ):
        reader.read(777, 1)
