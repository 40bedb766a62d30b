"""One task: stretches of source files → chunks of tokens for each stream, and a record of what is in them.

A stream is a split ("val"), or a split and a subset ("train/RedPajamaC4"). Runs in worker processes.
"""

import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from anlit.data import tokenizer as tokenizers
from anlit.data.preparation.formats import Columns, Record, format_of, read_bin_tokens
from anlit.data.preparation.plan import Piece, Task
from anlit.data.preparation.sources import refuse_changed
from anlit.data.preparation.splits import Splits
from anlit.data.preparation.workspace import Workspace
from anlit.data.storage.manifest import VAL
from anlit.errors import UserError
from anlit.reporting.files import replacing, write_json

HEADER = np.dtype("<u4")
BATCH_BYTES = 1 << 20  # text given to the tokenizer at once
SKIPPED_LISTED = 1000  # of one task
SEPARATOR_INSIDE = "the tokenizer makes the end-of-document token out of its text, which would cut it in two"
WRONG_FOR_A_FOLDER = re.compile(r"[^\w.-]|^\.")  # "." and ".." would lead elsewhere


@dataclass(frozen=True)
class Job:
    """What all tasks of a preparation have in common."""

    workspace: Workspace
    columns: Columns
    splits: Splits
    tokenizer: Path | None
    """None for source files that hold tokens already."""
    vocab_size: int
    end_of_document: int
    skip_bad: bool
    chunk_bytes: int

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(tokenizers.token_dtype(self.vocab_size)).newbyteorder("<")


class _Streams:
    """The tokens of a task: chunks of up to `chunk_bytes` for each stream, in their final place."""

    def __init__(self, job: Job, task: Task) -> None:
        self.job, self.task = job, task
        self.counts: dict[str, dict[str, Any]] = defaultdict(
            lambda: {"documents": 0, "bytes": 0, "tokens": 0, "chunks": []}
        )
        self._begun: dict[str, bytearray] = defaultdict(bytearray)

    def add(self, stream: str, tokens: np.ndarray, size: int, documents: int = 1) -> None:
        """Add documents with `size` bytes of text in all."""
        for key, value in (("documents", documents), ("bytes", size), ("tokens", len(tokens))):
            self.counts[stream][key] += value
        begun = self._begun[stream]
        begun += tokens.tobytes()
        full = self.job.chunk_bytes - self.job.chunk_bytes % tokens.itemsize
        while len(begun) >= full:
            self._write(stream, bytes(begun[:full]))
            del begun[:full]

    def end(self) -> None:
        """Write what is left."""
        for stream, begun in self._begun.items():
            if begun:
                self._write(stream, bytes(begun))

    def _write(self, stream: str, tokens: bytes) -> None:
        """A chunk in litdata's format with one item: number of items, where it begins and ends, the item."""
        start = 3 * HEADER.itemsize
        content = np.array([1, start, start + len(tokens)], dtype=HEADER).tobytes() + tokens
        chunks = self.counts[stream]["chunks"]
        name = f"chunk-{self.task.group:06d}-{self.task.number:05d}-{len(chunks):03d}.bin"
        path = self.job.workspace.target / stream / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(content)
        chunks.append(
            {
                "chunk_bytes": len(content),
                "chunk_size": 1,
                "dim": len(tokens) // self.job.dtype.itemsize,
                "filename": name,
                "crc32": zlib.crc32(content),
            }
        )


def encode_task(job: Job, task: Task) -> dict[str, Any]:
    """Write a task's chunks and then its record.

    Returns:
        The record: `streams` and `files` with their documents, bytes, tokens, and what was skipped.

    Raises:
        UserError: a document cannot be used, and bad ones are not to be skipped; or the first task is too small for the
            tokens that are held out from it.
        OSError: a file cannot be read or written.
    """
    streams = _Streams(job, task)
    if job.tokenizer is None:
        files = [_copy_tokens(job, piece, streams) for piece in task.pieces]
    else:
        tokenizer = _load_tokenizer(job.tokenizer, job.tokenizer.stat().st_mtime_ns)
        files = [_encode_piece(job, tokenizer, piece, streams) for piece in task.pieces]
    wanted = job.splits.first_tokens if task.is_first else 0
    if wanted and (found := streams.counts[VAL]["tokens"]) < wanted:
        raise UserError(
            f"The first part of the corpus has {found:,} tokens, too few to hold out {wanted:,} of them: set "
            "--val_tokens to a smaller number."
        )
    streams.end()
    for piece in task.pieces:  # before its record says that the task is done
        refuse_changed(piece.path, piece.state)
    record = {"streams": dict(streams.counts), "files": files}
    write_json(job.workspace.task_record(task.group, task.number), record)
    return record


@lru_cache(maxsize=1)
def _load_tokenizer(path: Path, written: int) -> Tokenizer:
    """The tokenizer of this worker process, kept with its cache of words."""
    return tokenizers.load_tokenizer(path)


def _encode_piece(job: Job, tokenizer: Tokenizer, piece: Piece, streams: _Streams) -> dict[str, Any]:
    """The record of a piece."""
    counts, skipped = {"documents": 0, "bytes": 0, "tokens": 0}, _Skipped(job, piece)
    for records in _batches(format_of(piece.name).read(piece.path, piece.span, job.columns), skipped):
        texts = [record.text or "" for record in records]
        arrays = tokenizers.encode_documents(tokenizer, texts, job.end_of_document, job.dtype)
        for record, tokens in zip(records, arrays, strict=True):
            if (tokens[:-1] == job.end_of_document).any():
                skipped.add(replace(record, problem="separator", detail=SEPARATOR_INSIDE))
                continue
            streams.add(_stream(job, piece, record, streams), tokens, record.size)
            for key, value in (("documents", 1), ("bytes", record.size), ("tokens", len(tokens))):
                counts[key] += value
    return {"name": piece.name, **counts, **skipped.record()}


class _Skipped:
    """Counts and lists the documents of a piece that cannot be used, or raises for the first of them."""

    def __init__(self, job: Job, piece: Piece) -> None:
        self.job, self.piece = job, piece
        self.reasons: dict[str, int] = defaultdict(int)
        self.listed: list[tuple[str, str, str]] = []

    def add(self, record: Record) -> None:
        if not self.job.skip_bad:
            raise UserError(
                f"{self.piece.path}, {record.where}: {record.detail}. Repair the file, or leave such documents out "
                "with --on_bad skip; what is done so far is kept."
            )
        assert record.problem is not None
        self.reasons[record.problem] += 1
        if len(self.listed) < SKIPPED_LISTED:
            self.listed.append((record.where, record.problem, record.detail))

    def record(self) -> dict[str, Any]:
        return {"skipped": dict(self.reasons), "skipped_list": self.listed} if self.reasons else {}


def _batches(records: Iterator[Record], skipped: _Skipped) -> Iterator[list[Record]]:
    """The usable records, about `BATCH_BYTES` of text at a time."""
    batch: list[Record] = []
    size = 0
    for record in records:
        if record.problem is not None:
            skipped.add(record)
            continue
        batch.append(record)
        size += record.size
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _stream(job: Job, piece: Piece, record: Record, streams: _Streams) -> str:
    split = job.splits.of_text(record.text or "", piece.split)
    if streams.task.is_first and job.splits.first_tokens and streams.counts[VAL]["tokens"] < job.splits.first_tokens:
        split = VAL
    return split if record.subset is None else f"{split}/{WRONG_FOR_A_FOLDER.sub('_', record.subset)}"


def _copy_tokens(job: Job, piece: Piece, streams: _Streams) -> dict[str, Any]:
    """A stretch of a .bin file. Its documents are counted by the token that each begins with."""
    tokens = read_bin_tokens(piece.path, piece.span.start, piece.span.stop)
    if len(tokens) and int(tokens.max()) >= job.vocab_size:
        raise UserError(
            f"{piece.path} holds token {int(tokens.max())}, and the vocabulary has {job.vocab_size}: "
            "it is damaged, or was made with another tokenizer (--tokenizer)."
        )
    documents = int((tokens == job.end_of_document).sum())
    streams.add(piece.split, tokens.astype(job.dtype, copy=False), 0, documents)
    return {"name": piece.name, "documents": documents, "bytes": 0, "tokens": len(tokens)}
