"""For the tests of `anlit prepare`: small sizes, processes to kill, and a reader of what was made.

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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from anlit.data.preparation import executors
from anlit.data.preparation.encode import encode_task
from anlit.data.preparation.prepare import prepare
from anlit.data.preparation.recipes import CORPORA, Options, Recipe
from tests.data.layouts import END_OF_DOCUMENT, cut, documents, json_lines, write

SMALL: dict[str, Any] = {"task_bytes": 20_000, "chunk_bytes": 10_001}
SIZES: dict[str, Any] = {"task_bytes": 6_000, "chunk_bytes": 10_001}
"""Of many tasks in a corpus of 50 documents."""
COUNTS = ("documents", "bytes", "tokens")


def recipe_of(corpus: str, source: Path | None, sizes: Mapping[str, int] = SMALL, **options: Any) -> Recipe:
    """A corpus's recipe with sizes so small that a few documents make several tasks and chunks."""
    make_recipe, _ = CORPORA[corpus]
    return replace(make_recipe(Options(source=source and str(source), **options)), **sizes)


def make(folder: Path, recipe: Recipe, workers: int = 1, **options: Any) -> dict[str, Any]:
    return prepare(folder, recipe, "anlit prepare", workers=workers, **options)


def assert_makes(folder: Path, recipe: Recipe, like: Path, **options: Any) -> None:
    make(folder, recipe, **options)
    assert hashes(folder) == hashes(like), folder


def train_tokenizer(path: Path, vocab_size: int = 800) -> Path:
    """A byte-level BPE file; its end-of-document token is the last, as GPT-2's."""
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


def text_file_source(folder: Path, texts: list[str]) -> str:
    for number, part in enumerate(cut(texts, 4)):
        write(folder / f"{number}.jsonl", b"".join(json_lines(part, field="content")))
    return "*.jsonl"


def write_texts(folder: Path, texts: list[str]) -> Path:
    """A file for each text, and what is left out: a copy, nothing, not UTF-8, another ending."""
    for number, text in enumerate(texts):
        write(folder / f"part{number % 3}" / f"{number}.txt", text.encode())
    (folder / "a copy.txt").write_bytes(texts[0].encode())
    (folder / "empty.txt").write_bytes(b"")
    (folder / "latin1.txt").write_bytes("größe".encode("latin-1"))
    (folder / "other.md").write_text("not asked for")
    return folder


def by_split(texts: Iterable[str], fraction: float) -> dict[str, list[str]]:
    """The streams that texts make of which a fraction is held out: those with the smallest hashes."""
    streams: dict[str, list[str]] = {"val": [], "train": []}
    for text in texts:
        is_held_out = int(sha256(text.encode()).hexdigest()[:8], 16) < fraction * 2**32
        streams["val" if is_held_out else "train"].append(text)
    return streams


def written(folder: Path) -> dict[int, int]:
    return {int(path.stem): path.stat().st_mtime_ns for path in (folder / "tasks").glob("0*.json")}


def interrupted(folder: Path, recipe: Recipe, tasks: int) -> None:

    def encode(job: Any, task: Any, left: Iterator[int] = iter(range(tasks))) -> int:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return encode_task(job, task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "encode_task", encode)
        with pytest.raises(KeyboardInterrupt):
            make(folder, recipe)
    assert len(written(folder)) == tasks


@functools.cache
def _tokenizer(content: bytes) -> Tokenizer:
    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a text is nothing but text
    return tokenizer


def encoded(path: str | Path, texts: Iterable[str], end_of_document: str = END_OF_DOCUMENT) -> list[int]:
    """The stream that texts make with a tokenizer.json: each and then its end-of-document token."""
    tokenizer = _tokenizer(Path(path).read_bytes())
    end = tokenizer.token_to_id(end_of_document)
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [token for encoding in encodings for token in [*encoding.ids, end]]


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def read_records(folder: Path) -> list[dict[str, Any]]:
    return [read_json(path) for path in sorted((folder / "tasks").glob("0*.json"))]


def read_files(folder: Path) -> dict[str, dict[str, Any]]:
    """What the records say of each source file; of a file in parts, the counts of all and the last part's hash."""
    files: dict[str, dict[str, Any]] = {}
    for piece in (piece for record in read_records(folder) for piece in record["files"]):
        before = files.get(piece["name"], {})
        files[piece["name"]] = piece | {key: before.get(key, 0) + piece[key] for key in COUNTS}
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
    tokens = read_stream(folder, stream)
    tokenizer = _tokenizer((folder / "tokenizer.json").read_bytes())
    ends = np.flatnonzero(tokens == tokenizer.token_to_id(END_OF_DOCUMENT))
    assert ends[-1] == len(tokens) - 1
    return tokenizer.decode_batch([part[:-1].tolist() for part in np.split(tokens, ends[:-1] + 1)])


def assert_holds(folder: Path, expected: Mapping[str, Sequence[str]]) -> None:
    """The folder holds these texts in these streams, in this order, and everything it says about them is true."""
    manifest = read_json(folder / "manifest.json")
    there = {"manifest.json", "tokenizer.json", "tasks/plan.json"}
    there |= {f"tasks/{task:06d}.json" for task in range(manifest["tasks"])}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for stream, texts in expected.items():
        tokens = encoded(folder / "tokenizer.json", texts)
        assert read_stream(folder, stream).tolist() == tokens, stream
        chunks = [chunk["filename"] for chunk in read_json(folder / stream / "index.json")["chunks"]]
        there |= {f"{stream}/{name}" for name in [*chunks, "index.json"]}
        size = sum(len(text.encode()) for text in texts)
        numbers = {"documents": len(texts), "bytes": size, "tokens": len(tokens), "chunks": len(chunks)}
        split, _, subset = stream.partition("/")
        assert not subset or manifest[split]["subsets"][subset] == numbers
        counts[""].update(numbers)
        counts[split].update(numbers)
    assert {*counts} == {"", *manifest["splits"]}
    for split, numbers in counts.items():
        assert numbers.items() <= (manifest[split] if split else manifest).items()
    for key in COUNTS:
        assert sum(file[key] for file in read_files(folder).values()) == counts[""][key]
    assert set(hashes(folder)) == there


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file under a folder, and "" for every empty folder; only the lock file is left out."""
    paths = [path for path in folder.rglob("*") if path.name != ".prepare.lock"]
    contents = {path: sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}
    contents |= {path: "" for path in paths if path.is_dir() and not any(path.iterdir())}
    return {path.relative_to(folder).as_posix(): content for path, content in contents.items()}


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory where there is room: preparing waits for the disk at every step, which adds up."""
    has_room = os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 1 << 30
    with tempfile.TemporaryDirectory(dir="/dev/shm" if has_room else None) as folder:
        yield Path(folder)


Process = multiprocessing.context.ForkProcess


def start(work: Callable[[], Any], output: Path | None = None) -> Process:
    """`work` in a forked process with a session of its own; what it and its children print goes to `output`."""

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


def finish(process: Process, seconds: float = 60) -> int | None:
    """Wait for a process; its exit code, None if it would not end and had to be ended with all that it started."""
    process.join(seconds)
    if (code := process.exitcode) is None:
        os.killpg(process.pid or 0, signal.SIGKILL)
    return code


def members(session: int) -> list[int]:
    living = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # it has just ended
            continue
        if int(its_session) == session and state != "Z":
            living.append(int(stat.parent.name))
    return living


def wait_for(condition: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)
