"""For the tests of `anlit prepare`: small sizes, forked processes to kill, and a reader of what was made.

The reader uses nothing of the package: struct, zlib, numpy and the tokenizers library.
"""

import functools
import json
import multiprocessing
import os
import shutil
import signal
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from anlit.cli import main
from anlit.data.preparation import executors
from anlit.data.preparation.encode import encode_task
from anlit.data.preparation.prepare import RunOptions, prepare
from anlit.data.preparation.recipes import CORPORA, Options, Recipe
from tests.data.layouts import END_OF_DOCUMENT, documents

SMALL: dict[str, Any] = {"task_bytes": 20_000, "chunk_bytes": 10_001}
SIZES: dict[str, Any] = {"task_bytes": 6_000, "chunk_bytes": 10_001}
"""Of many tasks in a corpus of 50 documents."""
KILLED = 9  # exit code of a process that a test ends on purpose


def recipe_of(corpus: str, source: Path | None, sizes: Mapping[str, int] = SMALL, **options: Any) -> Recipe:
    """A corpus's recipe with sizes so small that a few documents make several tasks and chunks."""
    make_recipe, _ = CORPORA[corpus]
    return replace(make_recipe(Options(source=source and str(source), **options)), **sizes)


def make(folder: Path, recipe: Recipe, workers: int = 1, **options: Any) -> dict[str, Any]:
    """Prepare `folder` in this process; the manifest."""
    return prepare(folder, recipe, RunOptions(workers=workers, command="anlit prepare", **options))


def train_tokenizer(path: Path, vocab_size: int = 800) -> Path:
    """A byte-level BPE file; unlike ours, its end-of-document token is the last, as GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((text[:2000] for text in documents(60, seed=7)), trainer)
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    assert tokenizer.token_to_id(END_OF_DOCUMENT) == vocab_size - 1
    tokenizer.save(str(path))
    return path


def cut(texts: list[str], n: int) -> list[list[str]]:
    """The runs of texts that the layouts put into n files."""
    return [texts[len(texts) * part // n : len(texts) * (part + 1) // n] for part in range(n)]


def text_file_source(folder: Path, texts: list[str], kind: str) -> str:
    """The texts as files of a kind; the pattern for them."""
    folder.mkdir()
    for number, part in enumerate(cut(texts, 4)):
        path = folder / f"{number}{kind}"
        if kind == ".parquet":
            pq.write_table(pa.table({"content": pa.array(part, pa.string())}), path, row_group_size=5)
        else:
            path.write_bytes(b"".join(json.dumps({"content": text}).encode() + b"\n" for text in part))
    return f"*{kind}"


def write_texts(folder: Path, texts: list[str]) -> Path:
    """A file for each text, and what is left out: a copy, nothing, not UTF-8, another ending."""
    for number, text in enumerate(texts):
        path = folder / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    (folder / "a copy.txt").write_bytes(texts[0].encode())
    (folder / "empty.txt").write_bytes(b"")
    (folder / "latin1.txt").write_bytes("größe".encode("latin-1"))
    (folder / "other.md").write_text("not asked for")
    return folder


def written(folder: Path) -> dict[int, int]:
    """When the record of each task that is done was written."""
    return {int(path.stem): path.stat().st_mtime_ns for path in (folder / "tasks").glob("0*.json")}


def interrupted(folder: Path, recipe: Recipe, tasks: int) -> None:
    """Begin a preparation and leave it after so many tasks."""

    def encode(job: Any, task: Any, left: Iterator[int] = iter(range(tasks))) -> int:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return encode_task(job, task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "encode_task", encode)
        with pytest.raises(KeyboardInterrupt):
            make(folder, recipe)
    assert len(written(folder)) == tasks


class PlainTokenizer:
    """A tokenizer.json as the tokenizers library reads it; "<|endoftext|>" inside a text is nothing but text."""

    def __init__(self, content: bytes) -> None:
        self.tokenizer = Tokenizer.from_buffer(content)
        self.tokenizer.encode_special_tokens = True
        self.end = self.tokenizer.token_to_id(END_OF_DOCUMENT)
        self.known: dict[str, list[int]] = {}

    def tokens(self, texts: Iterable[str]) -> list[int]:
        """The stream that the texts make: each and then its end-of-document token."""
        return [token for text in texts for token in [*self._ids(text), self.end]]

    def _ids(self, text: str) -> list[int]:
        if text not in self.known:
            self.known[text] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return self.known[text]

    def texts(self, stream: np.ndarray) -> list[str]:
        """The documents of a stream, decoded."""
        assert stream[-1] == self.end
        ends = np.flatnonzero(stream == self.end)
        parts = np.split(stream, ends[:-1] + 1)
        return self.tokenizer.decode_batch([part[part != self.end].tolist() for part in parts])


@functools.cache
def _plain_tokenizer(content: bytes) -> PlainTokenizer:
    return PlainTokenizer(content)


def plain_tokenizer(path: str | Path) -> PlainTokenizer:
    return _plain_tokenizer(Path(path).read_bytes())


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records of all tasks."""
    return [read_json(path) for path in sorted((folder / "tasks").glob("0*.json"))]


def read_files(folder: Path) -> dict[str, dict[str, Any]]:
    """What the records say of each source file; of a file in parts, the counts of all and the last part's hash."""
    files: dict[str, dict[str, Any]] = {}
    for piece in (piece for record in read_records(folder) for piece in record["files"]):
        counts = {
            key: files.get(piece["name"], {}).get(key, 0) + piece[key] for key in ("documents", "bytes", "tokens")
        }
        files[piece["name"]] = {**piece, **counts}
    return files


def read_stream(folder: Path, stream: str) -> np.ndarray:
    """All tokens of one stream ("val", "train/RedPajamaC4"); its index and its chunks are checked."""
    index = read_json(folder / stream / "index.json")
    number = int(index["config"]["data_format"][0].removeprefix("no_header_numpy:"))
    dtype = {5: np.dtype("<u2"), 2: np.dtype("<i4")}[number]
    parts = []
    for chunk in index["chunks"]:
        content = (folder / stream / chunk["filename"]).read_bytes()
        assert struct.unpack("<3I", content[:12]) == (chunk["chunk_size"], 12, len(content)) == (1, 12, len(content))
        assert (chunk["chunk_bytes"], chunk["crc32"]) == (len(content), zlib.crc32(content))
        parts.append(np.frombuffer(content[12:], dtype))
        assert len(parts[-1]) == chunk["dim"] > 0
    return np.concatenate(parts)


def read_texts(folder: Path, stream: str) -> list[str]:
    """The documents of one stream, decoded."""
    return plain_tokenizer(folder / "tokenizer.json").texts(read_stream(folder, stream))


def assert_holds(folder: Path, expected: Mapping[str, Sequence[str]]) -> None:
    """The folder holds these texts in these streams, in this order, and everything it says about them is true."""
    tokenizer = plain_tokenizer(folder / "tokenizer.json")
    counts = {}
    for stream, texts in expected.items():
        tokens = tokenizer.tokens(texts)
        assert read_stream(folder, stream).tolist() == tokens, stream
        assert read_texts(folder, stream) == list(texts), stream
        size = sum(len(text.encode()) for text in texts)
        chunks = len(read_json(folder / stream / "index.json")["chunks"])
        counts[stream] = {"documents": len(texts), "bytes": size, "tokens": len(tokens), "chunks": chunks}
    assert_counts(folder, counts)


def assert_counts(folder: Path, counts: Mapping[str, Mapping[str, int]]) -> None:
    """Manifest, records and the files that are there agree with the streams' documents, bytes, tokens, chunks."""
    manifest, records = read_json(folder / "manifest.json"), read_records(folder)
    splits = [split for split in ("train", "val", "test") if any(name.split("/")[0] == split for name in counts)]
    assert manifest["splits"] == splits
    for split in splits:
        parts = {name: counts[name] for name in counts if name.split("/")[0] == split}
        subsets = {name.split("/")[1]: dict(part) for name, part in parts.items() if "/" in name}
        assert manifest[split] == {**summed(parts.values()), **({"subsets": subsets} if subsets else {})}
    total = summed(counts.values())
    assert {key: manifest[key] for key in ("documents", "bytes", "tokens")} == {
        key: total[key] for key in ("documents", "bytes", "tokens")
    }
    for key in ("documents", "bytes", "tokens"):
        assert sum(file[key] for file in read_files(folder).values()) == total[key]
    there = {
        f"{name}/{chunk['filename']}" for name in counts for chunk in read_json(folder / name / "index.json")["chunks"]
    }
    there |= {f"{name}/index.json" for name in counts} | {"manifest.json", "tasks/plan.json"}
    there |= {f"tasks/{task:06d}.json" for task in range(manifest["tasks"])}
    there |= {"tokenizer.json"} if manifest["tokenizer_sha256"] else set()
    assert set(hashes(folder)) == there
    assert len(records) == manifest["tasks"]


def summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    chosen = list(parts)
    return {key: sum(part[key] for part in chosen) for key in ("documents", "bytes", "tokens", "chunks")}


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file under a folder, and "" for every empty folder; only the lock file is left out."""
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not (path.name == ".prepare.lock" and path.stat().st_size == 0):
            found[name] = sha256(path.read_bytes()).hexdigest()
        elif path.is_dir() and not any(path.iterdir()):
            found[name] = ""
    return found


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory where there is room: preparing waits for the disk at every step, which adds up."""
    memory = Path("/dev/shm")
    has_room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1 << 30
    with tempfile.TemporaryDirectory(dir=memory if has_room else None) as folder:
        yield Path(folder)


Process = multiprocessing.context.ForkProcess


def start(work: Callable[[], Any], output: Path | None = None) -> Process:
    """`work` in a forked process with a session of its own, to which all processes that it starts belong.

    Args:
        output: file for what it prints.
    """

    def run() -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run where it is ignored
        if output is not None:
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        work()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def start_command(arguments: Sequence[str], output: Path | None = None) -> Process:
    """`anlit …` in a forked process of its own session."""

    def command() -> None:
        raise SystemExit(main(list(arguments)))

    return start(command, output)


def finish(process: Process, seconds: float = 60) -> int | None:
    """Wait for a process; its exit code, None if it would not end and had to be ended with all that it started."""
    process.join(seconds)
    code = process.exitcode
    if code is None and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return code


def members(session: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # it has just ended
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_for(condition: Callable[[], Any], seconds: float = 20) -> None:
    """Wait until something holds, and fail if it does not come to it."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)
