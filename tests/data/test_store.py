"""Chunks read as one array, and what is said when they are not what the index says."""

import contextlib
import os
import pickle
import re
import resource
from pathlib import Path

import numpy as np
import pytest

from anlit import Mixture
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
    assert len(reader.open_files) == 2
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


def test_a_mixture_of_many_folders_with_many_chunks_under_the_usual_limit(tmp_path: Path) -> None:
    """20 folders of 70 chunks each, of which `ulimit -n 1024` allows no process to open all."""
    paths = {}
    for number in range(20):
        streams = {"train": random_tokens(1400, number), "val": random_tokens(1400, 50 + number)}
        write_prepared(tmp_path / str(number), streams, chunk_tokens=20)
        paths[f"folder{number}"] = str(tmp_path / str(number))

    def read_all() -> None:
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard_limit))
        data = Mixture(paths, batch_size=4, context_length=16)
        data.setup()
        n_blocks = sum(len(list(batch.tokens)) for batch in data.train_dataloader())
        assert n_blocks > 20 * 80
        assert sum(len(batch.tokens) for batch in data.val_dataloader()) > 20 * 80
        assert len(os.listdir("/proc/self/fd")) < 512

    assert finish(start(read_all)) == 0


def test_a_limit_of_open_files_is_named_and_no_chunk_is_called_damaged(
    folder: Path, tmp_path: Path
) -> None:
    reader, said = open_store(folder), tmp_path / "said"

    def read_with_nothing_left() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        with contextlib.suppress(OSError):
            while True:
                os.open("/dev/null", os.O_RDONLY)
        try:
            reader.read(0, 777)
        except UserError as error:
            os.write(2, str(error).encode())

    assert finish(start(read_with_nothing_left, said)) == 0
    limit = (
        r"too many files are open: this process may have 200 open \(`ulimit -n`\): raise that limit"
    )
    assert re.search(rf"chunk-0-0\.bin cannot be opened, {limit}", said.read_text())


def test_a_reader_gives_up_its_own_files_before_it_fails(
    folder: Path, tokens: np.ndarray, tmp_path: Path
) -> None:
    """Its own chunks may be all that can be closed."""

    def read_in_little_room() -> None:
        reader = open_store(folder)
        reader.read(0, 3000)
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        with contextlib.suppress(OSError):
            while True:
                os.open("/dev/null", os.O_RDONLY)
        np.testing.assert_array_equal(reader.read(3000, 2000), tokens[3000:])

    assert finish(start(read_in_little_room)) == 0


def test_a_failing_disk(folder: Path, monkeypatch) -> None:
    reader = open_store(folder)
    monkeypatch.setattr(os, "preadv", lambda *arguments: os.stat("/none"))
    with pytest.raises(
        UserError,
        match=r"chunk-0-1.bin is damaged \(it cannot be read: No such file or directory\)",
    ):
        reader.read(777, 1)
