"""Chunks are read as a single array. Errors name chunks that differ from their index."""

import contextlib
import os
import pickle
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

CHUNK_TOKENS = 777


def open_store(path: Path) -> TokenStore:
    arrays = shards.read_token_arrays(str(path), read_manifest(str(path)))
    return TokenStore(arrays["train"][0])


def finish_call(function: Callable[[], Any]) -> int | None:
    """Call a function in a forked process without files of earlier tests; return the exit code."""

    def call_without_files() -> None:
        os.closerange(3, 1 << 20)
        function()

    return finish(start(call_without_files))


def open_all_files() -> None:
    """Open files until the process has its limit of 200."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    with contextlib.suppress(OSError):
        while True:
            os.open("/dev/null", os.O_RDONLY)


@pytest.fixture(params=[np.uint16, np.int32])
def tokens(request) -> np.ndarray:
    vocabulary = 65_536 if request.param is np.uint16 else 200_000
    return random_tokens(5_000, seed=0, vocabulary=vocabulary, dtype=request.param)


@pytest.fixture
def folder(tmp_path: Path, tokens: np.ndarray) -> Path:
    streams = {"train": tokens, "val": tokens[:100]}
    write_prepared(tmp_path / "shards", streams, chunk_tokens=CHUNK_TOKENS)
    return tmp_path / "shards"


@pytest.mark.parametrize(
    ("first", "count"),
    [
        pytest.param(0, 5000, id="the whole array"),
        pytest.param(0, CHUNK_TOKENS, id="the first chunk"),
        pytest.param(CHUNK_TOKENS, CHUNK_TOKENS, id="the second chunk"),
        pytest.param(CHUNK_TOKENS - 1, 2, id="the border of two chunks"),
        pytest.param(2 * CHUNK_TOKENS - 1, 1700, id="four chunks"),
        pytest.param(4999, 1, id="the last token"),
        pytest.param(5000, 0, id="nothing after the end"),
        pytest.param(10, 0, id="nothing in the middle"),
    ],
)
def test_any_range_of_the_array_is_read_across_chunks(
    first: int, count: int, folder: Path, tokens: np.ndarray
) -> None:
    read_tokens = open_store(folder).read(first, count)

    assert read_tokens.dtype == tokens.dtype
    assert np.array_equal(read_tokens, tokens[first : first + count])


def test_neighbouring_blocks_share_a_token(folder: Path, tokens: np.ndarray) -> None:
    blocks = np.array([12, 0, 7, 48])

    rows = open_store(folder).read_blocks(blocks, 100)

    expected = [tokens[block * 100 : block * 100 + 101] for block in blocks]
    assert np.array_equal(rows, expected)


def test_a_store_can_be_pickled_and_used_after_a_fork(
    folder: Path, tokens: np.ndarray, monkeypatch
) -> None:
    monkeypatch.setattr(store, "OPEN_FILES", 2)
    reader = open_store(folder)
    reader.read(0, 5000)
    assert len(reader.open_files) == 2

    pickled_reader = pickle.loads(pickle.dumps(reader))

    def read_in_child() -> None:
        np.testing.assert_array_equal(reader.read(700, 900), tokens[700:1600])

    assert np.array_equal(pickled_reader.read(700, 900), tokens[700:1600])
    assert finish(start(read_in_child)) == 0
    assert np.array_equal(reader.read(3000, 900), tokens[3000:3900])


def test_each_chunk_is_checked_once(folder: Path, monkeypatch) -> None:
    checked: list[str] = []

    def record(descriptor: int, chunk: shards.Chunk) -> None:
        checked.append(chunk.filename)

    monkeypatch.setattr(store, "OPEN_FILES", 1)
    monkeypatch.setattr(store, "find_chunk_problem", record)
    reader = open_store(folder)

    reader.read(0, 2000)
    reader.read(0, 2000)

    assert checked == ["chunk-0-0.bin", "chunk-0-1.bin", "chunk-0-2.bin"]


@pytest.mark.parametrize("read_bytes", [100, 1 << 20])
def test_chunks_that_are_damaged_vanish_or_shrink_during_training_are_named(
    folder: Path, read_bytes: int, monkeypatch
) -> None:
    monkeypatch.setattr(shards, "CHECKSUM_READ_BYTES", read_bytes)
    chunks = [folder / "train" / f"chunk-0-{number}.bin" for number in range(4)]
    reader = open_store(folder)
    reader.read(0, CHUNK_TOKENS)  # opens the first chunk

    os.truncate(chunks[0], 60)
    os.truncate(chunks[1], 60)
    chunks[2].unlink()
    flip(chunks[3])

    problems = [
        "it ends .* bytes too soon",
        "it has 60 bytes instead of .*",
        "it is missing",
        "its CRC-32 is .*",
    ]
    for number, problem in enumerate(problems):
        message = rf"chunk-0-{number}.bin is damaged \({problem}\): .*prepare it again"
        with pytest.raises(UserError, match=message):
            reader.read(CHUNK_TOKENS * number, CHUNK_TOKENS)


def test_a_mixture_of_many_chunks_stays_under_the_usual_limit_of_open_files(tmp_path: Path) -> None:
    """20 folders of 70 chunks each: more than `ulimit -n 1024` allows to open."""
    paths = {}
    for number in range(20):
        folder = tmp_path / str(number)
        streams = {"train": random_tokens(1400, number), "val": random_tokens(1400, 50 + number)}
        write_prepared(folder, streams, chunk_tokens=20)
        paths[f"folder{number}"] = str(folder)

    def read_all() -> None:
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard_limit))
        data = Mixture(paths, batch_size=4, context_length=16)
        data.setup()
        n_blocks = sum(len(batch.tokens) for batch in data.train_dataloader())
        assert n_blocks > 20 * 80
        assert sum(len(batch.tokens) for batch in data.val_dataloader()) > 20 * 80
        assert len(os.listdir("/proc/self/fd")) < 512

    assert finish_call(read_all) == 0


def test_an_error_names_the_limit_of_open_files_and_calls_no_chunk_damaged(
    folder: Path, tmp_path: Path
) -> None:
    reader = open_store(folder)
    output = tmp_path / "output"

    def read_without_free_files() -> None:
        open_all_files()
        try:
            reader.read(0, CHUNK_TOKENS)
        except UserError as error:
            os.write(2, str(error).encode())

    assert finish(start(read_without_free_files, output)) == 0
    message = (
        r"chunk-0-0\.bin cannot be opened \(Too many open files\): make it readable, or raise "
        r"the limit of open files \(`ulimit -n`, now 200\)"
    )
    assert re.search(message, output.read_text())


def test_a_reader_closes_its_chunks_before_it_fails(folder: Path, tokens: np.ndarray) -> None:
    """Its chunks may be the only files that can be closed."""

    def read_without_free_files() -> None:
        reader = open_store(folder)
        reader.read(0, 3000)
        open_all_files()
        np.testing.assert_array_equal(reader.read(3000, 2000), tokens[3000:])

    assert finish_call(read_without_free_files) == 0


def test_an_error_of_the_disk_names_the_chunk(folder: Path, monkeypatch) -> None:
    reader = open_store(folder)
    monkeypatch.setattr(os, "preadv", lambda *arguments: os.stat("/none"))

    problem = r"it cannot be read: No such file or directory"
    with pytest.raises(UserError, match=rf"chunk-0-1.bin is damaged \({problem}\)"):
        reader.read(CHUNK_TOKENS, 1)
