"""One task: a run of source files, or one part of a large file → chunks of tokens for each stream, then a record.

    DIR/<stream>/chunk-TTTTTT-NNN.bin     chunk N of task T, in litdata's format
    DIR/tasks/TTTTTT.json                 its record: counts, checksums, what was skipped

A stream is a split ("val"), or a split and a subset ("train/RedPajamaC4"). Doing a task twice changes nothing.
"""

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from anlit.data import tokenizer as tokenizers
from anlit.data.preparation.formats import Record, parts_of, read_file
from anlit.data.preparation.formats.base import foreign_file
from anlit.data.preparation.recipes import Recipe
from anlit.data.preparation.sources import SourceFile, file_sha256
from anlit.data.round_trip import Change, Kind, RoundTrip
from anlit.data.storage.manifest import TASKS, TOKENIZER, VAL
from anlit.data.storage.shards import CHUNK_HEADER_BYTES
from anlit.errors import UserError
from anlit.io.write import replacing, write_json

BIN_BEGINNING, BIN_HEADER_BYTES = (
    [20240520, 1],
    1024,
)  # format and version; the number of tokens follows
BATCH_BYTES = 1 << 20  # text given to the tokenizer at once
RECORD_BYTES = 256  # what a record without text counts for in a batch
SKIPPED_LISTED = 1000  # of one task
COUNTS = ("documents", "bytes", "tokens")
NO_TOKEN = "the tokenizer makes no token of its text"
NO_TEXT = "nothing of its text comes back from the tokenizer's tokens"
KEPT = "what is done so far is kept"
SEPARATOR_INSIDE = (
    "the tokenizer makes the end-of-document token out of its text, which would cut it in two"
)
WRONG_FOR_A_FOLDER = re.compile(r"[^\w.-]|^\.")  # "." and ".." would lead elsewhere


class Piece(NamedTuple):
    """A source file, or a part of one."""

    file: SourceFile
    part: int
    parts: int

    @property
    def name(self) -> str | None:
        """Which part of the file it is, such as "2 of 5"; None for a whole file."""
        return f"{self.part + 1} of {self.parts}" if self.parts > 1 else None


class Task(NamedTuple):
    """What a worker encodes at once."""

    number: int
    pieces: tuple[Piece, ...]
    size: int  # its share of the source files' bytes, for the progress bar


@dataclass(frozen=True)
class Job:
    """What all tasks of a preparation have in common."""

    folder: Path
    recipe: Recipe  # its source fetches files and lists none
    tokenizer_sha256: str | None
    vocab_size: int
    end_of_document: int
    skip_bad: bool

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(
            "<u2" if self.vocab_size <= 1 << 16 else "<i4"
        )  # the smallest that holds all ids


def tasks_of(files: list[SourceFile], recipe: Recipe) -> list[Task]:
    """Runs of at least `task_bytes`, of files or parts of them: a function of the names and sizes alone."""
    tasks: list[Task] = []
    pieces: list[Piece] = []
    size = 0
    for file in files:
        parts = max(1, file.size // recipe.task_bytes)
        if not recipe.tokenized:
            parts = parts_of(file.name, file.size, recipe.task_bytes)
        for part in range(parts):
            pieces.append(Piece(file, part, parts))
            size += file.size // parts
            if size >= recipe.task_bytes or (file is files[-1] and part == parts - 1):
                tasks.append(Task(len(tasks), tuple(pieces), size))
                pieces, size = [], 0
    return tasks


def record_path(folder: Path, task: int) -> Path:
    return folder / TASKS / f"{task:06d}.json"


def chunk_name(task: int, number: int) -> str:
    return f"chunk-{task:06d}-{number:03d}.bin"


class _Streams:
    """The tokens of a task: chunks of up to `chunk_bytes` for each stream, in their final place."""

    def __init__(self, job: Job, task: Task) -> None:
        self.job, self.task = job, task
        self.counts: dict[str, dict[str, Any]] = defaultdict(
            lambda: {**dict.fromkeys(COUNTS, 0), "chunks": [], "changes": {}}
        )
        self._begun: dict[str, bytearray] = defaultdict(bytearray)

    def add(
        self,
        stream: str,
        tokens: np.ndarray,
        size: int,
        documents: int = 1,
        change: Change | None = None,
    ) -> None:
        """Add documents with `size` bytes of text in all; `change` is what their tokens do to the text."""
        if change is not None:
            changes = self.counts[stream]["changes"]
            changes[change.kind] = changes.get(change.kind, 0) + documents
        for key, value in zip(COUNTS, (documents, size, len(tokens)), strict=True):
            self.counts[stream][key] += value
        begun = self._begun[stream]
        begun += tokens.tobytes()
        full = self.job.recipe.chunk_bytes // tokens.itemsize * tokens.itemsize
        while len(begun) >= full:
            self._write(stream, bytes(begun[:full]))
            del begun[:full]

    def end(self) -> dict[str, dict[str, Any]]:
        """Write what is left; the counts and chunks of each stream."""
        for stream, begun in self._begun.items():
            if begun:
                self._write(stream, bytes(begun))
        return {name: stream for name, stream in self.counts.items() if stream["chunks"]}

    def _write(self, stream: str, tokens: bytes) -> None:
        """A chunk in litdata's format with one item: number of items, where it begins and ends, the item."""
        content = (
            np.array([1, CHUNK_HEADER_BYTES, CHUNK_HEADER_BYTES + len(tokens)], "<u4").tobytes()
            + tokens
        )
        chunks = self.counts[stream]["chunks"]
        path = self.job.folder / stream / chunk_name(self.task.number, len(chunks))
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(content)
        chunks.append((len(tokens) // self.job.dtype.itemsize, zlib.crc32(content)))

    def stream_of(self, record: Record, split: str) -> str:
        """The stream of a document in a file of `split`; the first ones of the corpus may be held out."""
        splits = self.job.recipe.splits
        split = splits.of_text(record.text or "", split)
        if self.task.number == 0 and self.counts[VAL]["tokens"] < splits.first_tokens:
            split = VAL
        return (
            split
            if record.subset is None
            else f"{split}/{WRONG_FOR_A_FOLDER.sub('_', record.subset)}"
        )


def encode_task(job: Job, task: Task) -> int:
    """Write a task's chunks and then its record; the number of its tokens. Runs in worker processes.

    Raises OSError, or UserError for a document that cannot be used or a file that is changed meanwhile.
    """
    streams = _Streams(job, task)
    files = [_encode_piece(job, piece, streams) for piece in task.pieces]
    wanted = job.recipe.splits.first_tokens
    if task.number == 0 and (n_tokens := streams.counts[VAL]["tokens"]) < wanted:
        said = f"has {n_tokens:,} tokens, too few to hold out {wanted:,} of them: set --val_tokens to a smaller number"
        raise UserError(f"The first part of the corpus {said}.")
    used = streams.end()
    write_json(record_path(job.folder, task.number), {"streams": used, "files": files})
    return sum(stream["tokens"] for stream in used.values())


def _encode_piece(job: Job, piece: Piece, streams: _Streams) -> dict[str, Any]:
    """The record of a piece, which has to stay as it is while it is read."""
    file = piece.file
    path = job.recipe.source.fetched(file, job.folder / TASKS)
    before = path.stat()
    sha256 = file_sha256(path, piece.part, piece.parts)
    counts = (_copy_tokens if job.recipe.tokenized else _encode_text)(job, piece, path, streams)
    after = path.stat()
    has_changed = (before.st_ino, before.st_ctime_ns) != (after.st_ino, after.st_ctime_ns)
    if has_changed or (file.sha256 and piece.parts == 1 and sha256 != file.sha256):
        raise UserError(
            f"{path} was changed while it was read: repeat the command when nothing writes to it any more; {KEPT}."
        )
    part = {} if piece.name is None else {"part": piece.name}
    return {"name": file.name, **part, "sha256": sha256, **counts}


def _encode_text(job: Job, piece: Piece, path: Path, streams: _Streams) -> dict[str, Any]:
    tokenizer, round_trip = _load_tokenizer(job.folder / TOKENIZER, str(job.tokenizer_sha256))
    split = job.recipe.splits.of_file(piece.file)
    counts, skipped = Counter(dict.fromkeys(COUNTS, 0)), Counter[str]()
    listed: list[tuple[str, str, str]] = []
    first_change: dict[Kind, str] = {}
    for records in _batches(
        read_file(piece.file.name, path, job.recipe.columns, piece.part, piece.parts)
    ):
        texts = [record.text for record in records if record.text is not None]
        arrays = tokenizers.encode_documents(tokenizer, texts, job.end_of_document, job.dtype)
        encoded = list(arrays)
        changes = round_trip.changes(texts, [tokens[:-1] for tokens in encoded])
        of_texts = zip(encoded, changes, strict=True)
        for record in records:
            problem, detail = record.problem, record.detail
            if record.text is not None:
                tokens, change = next(of_texts)
                problem, detail = _problem_with(tokens, job.end_of_document, change)
                if problem is None:
                    streams.add(
                        streams.stream_of(record, split), tokens, record.size, change=change
                    )
                    counts.update(documents=1, bytes=record.size, tokens=len(tokens))
                    if change is not None and change.kind not in first_change:
                        first_change[change.kind] = f"{record.where}: {change.place}"
                    continue
            if not job.skip_bad:
                raise bad_document(
                    f"{path if piece.file.path else piece.file.name}, {record.where}: {detail}"
                )
            skipped[str(problem)] += 1
            if len(listed) < SKIPPED_LISTED:
                listed.append((record.where, str(problem), detail))
    result: dict[str, Any] = dict(counts)
    if first_change:
        result["first_change"] = first_change
    if skipped:
        result |= {"skipped": skipped, "skipped_list": listed}
    return result


def _problem_with(
    tokens: np.ndarray, end_of_document: int, change: Change | None
) -> tuple[str | None, str]:
    """Why the tokens of a document, with the one that ends it, cannot be used: the problem and its detail."""
    if len(tokens) == 1:
        return "no_token", NO_TOKEN
    if change is not None and change.kind == Kind.LOST:
        return "no_text", NO_TEXT
    if (tokens[:-1] == end_of_document).any():
        return "separator", SEPARATOR_INSIDE
    return None, ""


def bad_document(what: str) -> UserError:
    """What stops the command, unless the user lets it leave out what cannot be used."""
    return UserError(
        f"{what}. Repair the file, or leave such documents out with anlit prepare's --on_bad skip; {KEPT}."
    )


@lru_cache(maxsize=1)
def _load_tokenizer(path: Path, sha256: str) -> tuple[Tokenizer, RoundTrip]:
    """The tokenizer of this worker process, kept with its cache of words."""
    tokenizer = tokenizers.load_tokenizer(path)
    return tokenizer, RoundTrip(tokenizer)


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """The records, about `BATCH_BYTES` of text at a time."""
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += record.size or RECORD_BYTES
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def _copy_tokens(job: Job, piece: Piece, path: Path, streams: _Streams) -> dict[str, Any]:
    """A part of a .bin file: a header of 256 int32, and uint16 tokens, of which one begins each document."""
    if (foreign := foreign_file(piece.file.name, path)) is not None:
        raise UserError(f"{path} is {foreign}.")
    size = path.stat().st_size
    header, n_tokens = np.fromfile(path, "<i4", 3).tolist(), (size - BIN_HEADER_BYTES) // 2
    if size < BIN_HEADER_BYTES or header != [*BIN_BEGINNING, n_tokens] or size % 2:
        raise UserError(
            f"{path} is not a whole file of tokens: with {size:,} bytes it has to begin with "
            f"{[*BIN_BEGINNING, n_tokens]} and begins with {header}. Fetch the file again, or leave it out."
        )
    start, stop = (n_tokens * part // piece.parts for part in (piece.part, piece.part + 1))
    tokens = np.fromfile(path, "<u2", stop - start, offset=BIN_HEADER_BYTES + start * 2)
    if (largest := int(tokens.max(initial=0))) >= job.vocab_size:
        raise UserError(
            f"{path} holds token {largest}, and the vocabulary has {job.vocab_size}: "
            "it is damaged, or was made with another tokenizer (--tokenizer)."
        )
    documents = int((tokens == job.end_of_document).sum())
    streams.add(
        job.recipe.splits.of_file(piece.file), tokens.astype(job.dtype, copy=False), 0, documents
    )
    return dict(zip(COUNTS, (documents, 0, len(tokens)), strict=True))
