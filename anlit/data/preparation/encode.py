"""A task: source files, or pieces of them → chunks of tokens for each stream, then a record.

Doing a task twice changes nothing.
"""

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from anlit.data import tokenizer as tokenizers
from anlit.data.preparation.formats import read_file
from anlit.data.preparation.formats.text import Record
from anlit.data.preparation.formats.token_files import read_tokens
from anlit.data.preparation.sources import SourceFile, file_sha256
from anlit.data.preparation.tasks import (
    COUNT_KEYS,
    PROGRESS_KEPT,
    SKIPPED_LISTED,
    Job,
    Piece,
    Task,
    bad_document,
    chunk_name,
    columns_of,
    record_path,
    split_of_document,
    split_of_file,
)
from anlit.data.round_trip import ChangeKind, RoundTrip
from anlit.data.storage.manifest import TASKS, TEXT_HASH, TOKENIZER, VAL, as_hex, hash_text
from anlit.data.storage.shards import CHUNK_HEADER_BYTES
from anlit.errors import UserError
from anlit.io.write import replacing, write_json

BATCH_BYTES = 1 << 20
"""Text that the tokenizer gets at once."""
SEPARATOR_INSIDE = (
    "the tokenizer makes the end-of-document token out of its text, which would cut it in two"
)
RECORD_BYTES = 256
"""Size of a record without text in a batch."""
WRONG_FOR_A_FOLDER = re.compile(r"[^\w.-]|^\.")
"""Characters of a subset's name that its folder may not have; "." and ".." would lead elsewhere."""


def _empty_stream() -> dict[str, Any]:
    return {**dict.fromkeys(COUNT_KEYS, 0), "chunks": [], "changes": {}}


class _ChunkWriter:
    """The chunks of a task, written to their final paths.

    Attributes:
        streams: counts, changes and chunks of each stream, as in the task's record.
    """

    def __init__(self, job: Job, task: int) -> None:
        self.job = job
        self.task = task
        self.streams: dict[str, dict[str, Any]] = defaultdict(_empty_stream)
        self._text_sums: dict[str, int] = defaultdict(int)
        self._unwritten: dict[str, bytearray] = defaultdict(bytearray)

    def add(
        self,
        stream: str,
        tokens: np.ndarray,
        n_bytes: int,
        n_documents: int = 1,
        change: ChangeKind | None = None,
        text: str | None = None,
    ) -> None:
        """Add documents of `n_bytes` of text.

        `change` is how their tokens change the text. `text` belongs to a single document.
        """
        counts = self.streams[stream]
        if text is not None:
            self._text_sums[stream] += hash_text(text)
        if change is not None:
            changes = counts["changes"]
            changes[change] = changes.get(change, 0) + n_documents
        counts["documents"] += n_documents
        counts["bytes"] += n_bytes
        counts["tokens"] += len(tokens)
        unwritten = self._unwritten[stream]
        unwritten += tokens.tobytes()
        full = self.job.recipe.chunk_bytes // tokens.itemsize * tokens.itemsize
        while len(unwritten) >= full:
            self._write(stream, bytes(unwritten[:full]))
            del unwritten[:full]

    def finish(self) -> dict[str, dict[str, Any]]:
        """Write the remaining tokens. Return `streams`, without the empty ones."""
        for stream, unwritten in self._unwritten.items():
            if unwritten:
                self._write(stream, bytes(unwritten))
        for stream, total in self._text_sums.items():
            self.streams[stream][TEXT_HASH] = as_hex(total)
        return {name: counts for name, counts in self.streams.items() if counts["chunks"]}

    def _write(self, stream: str, tokens: bytes) -> None:
        """Write a chunk in litdata's format: one item, after its number, start and end."""
        header = np.array([1, CHUNK_HEADER_BYTES, CHUNK_HEADER_BYTES + len(tokens)], "<u4")
        content = header.tobytes() + tokens
        chunks = self.streams[stream]["chunks"]
        path = self.job.folder / stream / chunk_name(self.task, len(chunks))
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(content)
        chunks.append((len(tokens) // self.job.dtype.itemsize, zlib.crc32(content)))


def encode_task(job: Job, task: Task) -> int:
    """Write a task's chunks and then its record. Return the number of its tokens. Runs in workers.

    Raises OSError, or UserError if a document cannot be used or a file changes meanwhile.
    """
    writer = _ChunkWriter(job, task.number)
    files = [_encode_piece(job, task, piece, writer) for piece in task.pieces]
    val_tokens = job.recipe.val_tokens
    if task.number == 0 and writer.streams[VAL]["tokens"] < val_tokens:
        n_tokens = writer.streams[VAL]["tokens"]
        raise UserError(
            f"The first part of the corpus has {n_tokens:,} tokens, too few to hold out "
            f"{val_tokens:,} of them: set --val_tokens to a smaller number"
        )
    streams = writer.finish()
    write_json(record_path(job.folder, task.number), {"streams": streams, "files": files})
    return sum(counts["tokens"] for counts in streams.values())


def _encode_piece(job: Job, task: Task, piece: Piece, writer: _ChunkWriter) -> dict[str, Any]:
    """Encode a piece and return its record. UserError if its file changes meanwhile."""
    file, number, n_pieces = piece
    path = job.source.fetch(file, job.folder / TASKS)
    status = path.stat()
    sha256 = file_sha256(path, number, n_pieces)
    if job.recipe.is_tokenized:
        counts = _copy_tokens(job, piece, path, writer)
    else:
        counts = _TextEncoder(job, task, piece, writer).encode(path)
    new_status = path.stat()
    is_same_file = status.st_ino == new_status.st_ino
    has_changed = not is_same_file or status.st_ctime_ns != new_status.st_ctime_ns
    if has_changed or (file.sha256 and n_pieces == 1 and sha256 != file.sha256):
        raise UserError(
            f"{path} was changed while it was read: repeat the command when nothing writes to it "
            f"any more; {PROGRESS_KEPT}"
        )
    record = {"name": file.name}
    if piece.label is not None:
        record["part"] = piece.label
    return {**record, "sha256": sha256, **counts}


def _copy_tokens(job: Job, piece: Piece, path: Path, writer: _ChunkWriter) -> dict[str, Any]:
    """Copy a piece of a file of tokens. Return its counts."""
    file, number, n_pieces = piece
    tokens = read_tokens(file.name, path, job.vocab_size, number, n_pieces)
    n_documents = int((tokens == job.end_of_document).sum())
    split = split_of_file(job.recipe, file)
    writer.add(split, tokens.astype(job.dtype, copy=False), 0, n_documents)
    return {"documents": n_documents, "bytes": 0, "tokens": len(tokens)}


class _TextEncoder:
    """Encodes the documents of a piece of text, and counts them."""

    def __init__(self, job: Job, task: Task, piece: Piece, writer: _ChunkWriter) -> None:
        self.job = job
        self.task = task
        self.piece = piece
        self.writer = writer
        self.counts = Counter(dict.fromkeys(COUNT_KEYS, 0))
        self.skipped = Counter[str]()
        self.skipped_list: list[tuple[str, str, str]] = []

    def encode(self, path: Path) -> dict[str, Any]:
        """Encode all documents. Return the counts for the record of the piece."""
        file, number, n_pieces = self.piece
        tokenizer, round_trip = _load_tokenizer(
            self.job.folder / TOKENIZER, str(self.job.tokenizer_sha256)
        )
        columns = columns_of(self.job.recipe)
        for records in _batches(read_file(file.name, path, columns, number, n_pieces)):
            texts = [record.text for record in records if record.text is not None]
            encoded = list(
                tokenizers.encode_documents(
                    tokenizer, texts, self.job.end_of_document, self.job.dtype
                )
            )
            changes = round_trip.find_changes(texts, [tokens[:-1] for tokens in encoded])
            results = zip(encoded, changes, strict=True)
            for record in records:
                if record.text is None:
                    self._skip(path, record, str(record.problem), record.detail)
                else:
                    self._add(path, record, *next(results))
        counts: dict[str, Any] = dict(self.counts)
        if self.skipped:
            counts["skipped"] = self.skipped
            counts["skipped_list"] = self.skipped_list
        return counts

    def _add(
        self, path: Path, record: Record, tokens: np.ndarray, change: ChangeKind | None
    ) -> None:
        """Add a document to its stream, unless its tokens cannot be used."""
        problem, detail = _problem_with(tokens, self.job.end_of_document, change)
        if problem is not None:
            self._skip(path, record, problem, detail)
            return
        stream = self._stream_of(record)
        self.writer.add(stream, tokens, record.size, change=change, text=record.text)
        self.counts.update(documents=1, bytes=record.size, tokens=len(tokens))

    def _skip(self, path: Path, record: Record, problem: str, detail: str) -> None:
        """Count a document that is left out. Raise UserError if the user has not allowed that."""
        if not self.job.skip_bad:
            raise bad_document(f"{shown_name(self.piece.file, path)}, {record.location}: {detail}")
        self.skipped[problem] += 1
        if len(self.skipped_list) < SKIPPED_LISTED:
            self.skipped_list.append((record.location, problem, detail))

    def _stream_of(self, record: Record) -> str:
        """Return the stream of a document. The first tokens of the corpus may be held out."""
        recipe = self.job.recipe
        if self.task.number == 0 and self.writer.streams[VAL]["tokens"] < recipe.val_tokens:
            split = VAL
        else:
            split = split_of_document(recipe, self.piece.file, record.text or "")
        if record.subset is None:
            return split
        return f"{split}/{WRONG_FOR_A_FOLDER.sub('_', record.subset)}"


def shown_name(file: SourceFile, path: Path) -> str:
    """Return the name of a file for a message: the path of a local file, the hub's own name."""
    return str(path) if file.path is not None else file.name


def _problem_with(
    tokens: np.ndarray, end_of_document: int, change: ChangeKind | None
) -> tuple[str | None, str]:
    """Return why a document's tokens cannot be used, and the detail. The last token ends it."""
    if len(tokens) == 1:
        return "no_token", "the tokenizer makes no token of its text"
    if change == ChangeKind.LOST:
        return "no_text", "nothing of its text comes back from the tokenizer's tokens"
    if (tokens[:-1] == end_of_document).any():
        return "separator", SEPARATOR_INSIDE
    return None, ""


@lru_cache(maxsize=1)
def _load_tokenizer(path: Path, sha256: str) -> tuple[Tokenizer, RoundTrip]:
    """Return the tokenizer of this worker process, which keeps its cache of words."""
    tokenizer = tokenizers.load_tokenizer(path)
    return tokenizer, RoundTrip(tokenizer)


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yield the records, about `BATCH_BYTES` of text at once."""
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += record.size or RECORD_BYTES
        if size >= BATCH_BYTES:
            yield batch
            batch = []
            size = 0
    yield batch
