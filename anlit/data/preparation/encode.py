"""One task: stretches of source files → a file of tokens for each stream, and a record of what is in them.

A stream is a split ("val"), or a split and a subset ("train/RedPajamaC4"). Runs in worker processes.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from tokenizers import Tokenizer

from anlit.data import tokenizer as tokenizers
from anlit.data.preparation.files import bad_document, refuse_changed
from anlit.data.preparation.formats import Columns, Record, format_of, read_bin_tokens
from anlit.data.preparation.plan import Piece, Task
from anlit.data.preparation.splits import Splits
from anlit.data.preparation.workspace import Workspace
from anlit.errors import UserError
from anlit.reporting.files import replacing, write_json

BATCH_BYTES = 1 << 20  # text given to the tokenizer at once
SKIPPED_LISTED = 1000  # of one task
SEPARATOR_INSIDE = "the tokenizer makes the end-of-document token out of its text, which would cut it in two"
WRONG_FOR_A_FOLDER = re.compile(r"[^\w.-]|^\.")  # "." and ".." would lead elsewhere


@dataclass(frozen=True)
class Job:
    """What all tasks of a preparation have in common; given to a worker once."""

    workspace: Workspace
    columns: Columns
    splits: Splits
    tokenizer: Path | None
    """None for source files that hold tokens already."""
    vocab_size: int
    end_of_document: int
    skip_bad: bool
    list_documents: bool = False
    """Write down every document's length: for a split that is cut off at a number of tokens."""

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(tokenizers.token_dtype(self.vocab_size)).newbyteorder("<")


@dataclass
class Counts:
    """Of a stream, or of a source file."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0

    def add(self, size: int, n_tokens: int) -> None:
        self.documents += 1
        self.bytes += size
        self.tokens += n_tokens


@dataclass
class _Output:
    """What a task has written so far."""

    streams: dict[str, Counts] = field(default_factory=lambda: defaultdict(Counts))
    files: list[dict[str, Any]] = field(default_factory=list)
    documents: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def record(self) -> dict[str, Any]:
        return {
            "streams": {name: vars(counts) for name, counts in sorted(self.streams.items())},
            "files": self.files,
            "documents": self.documents,
        }


class _StreamFiles:
    """The open files of a task's streams; they take their place when the task ends well."""

    def __init__(self, workspace: Workspace, task: Task, stack: ExitStack) -> None:
        self.workspace, self.task, self.stack = workspace, task, stack
        self.files: dict[str, IO[bytes]] = {}

    def write(self, stream: str, tokens: np.ndarray) -> None:
        if stream not in self.files:
            path = self.workspace.task_tokens(self.task.group, self.task.number, stream)
            temporary = self.stack.enter_context(replacing(path))
            self.files[stream] = self.stack.enter_context(temporary.open("wb"))
        self.files[stream].write(tokens.tobytes())


def encode_task(job: Job, task: Task) -> dict[str, Any]:
    """Encode a task, unless that is done already.

    Returns:
        The task's record: `streams` and `files` with their documents, bytes, tokens, and what was skipped.

    Raises:
        UserError: a document cannot be used, and bad ones are not to be skipped.
        OSError: a file cannot be read or written.
    """
    output = _Output()
    with ExitStack() as stack:
        files = _StreamFiles(job.workspace, task, stack)
        for piece in task.pieces:
            if job.tokenizer is None:
                _copy_tokens(job, piece, output, files)
            else:
                _encode_piece(job, _tokenizer(job.tokenizer), piece, output, files)
        for piece in task.pieces:  # before the tokens take their place
            refuse_changed(piece.path, piece.state)
    record = output.record()
    write_json(job.workspace.task_record(task.group, task.number), record)
    return record


def _tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of this worker process, kept with its cache of words."""
    return _load_tokenizer(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _load_tokenizer(path: Path, written: int) -> Tokenizer:
    return tokenizers.load_tokenizer(path)


def _encode_piece(job: Job, tokenizer: Tokenizer, piece: Piece, output: _Output, files: _StreamFiles) -> None:
    counts, skipped = Counts(), _Skipped(job, piece)
    for records in _batches(format_of(piece.name).read(piece.path, piece.span, job.columns), skipped):
        texts = [record.text or "" for record in records]
        arrays = tokenizers.encode_documents(tokenizer, texts, job.end_of_document, job.dtype)
        written: dict[str, list[np.ndarray]] = defaultdict(list)
        for record, tokens in zip(records, arrays, strict=True):
            if (tokens[:-1] == job.end_of_document).any():
                skipped.add(replace(record, problem="separator", detail=SEPARATOR_INSIDE))
                continue
            stream = _stream(job.splits, piece, record)
            written[stream].append(tokens)
            counts.add(record.size, len(tokens))
            output.streams[stream].add(record.size, len(tokens))
            if job.list_documents:
                output.documents[stream].append((len(tokens), record.size))
        for stream, parts in written.items():
            files.write(stream, np.concatenate(parts))
    output.files.append({"name": piece.name, **vars(counts), **skipped.record()})


class _Skipped:
    """Counts and lists the documents of a piece that cannot be used, or refuses the first of them."""

    def __init__(self, job: Job, piece: Piece) -> None:
        self.job, self.piece = job, piece
        self.reasons: dict[str, int] = defaultdict(int)
        self.listed: list[tuple[str, str, str]] = []

    def add(self, record: Record) -> None:
        if not self.job.skip_bad:
            raise bad_document(self.piece.path, record.where, record.detail)
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


def _stream(splits: Splits, piece: Piece, record: Record) -> str:
    split = splits.of_text(record.text or "", piece.split)
    return split if record.subset is None else f"{split}/{WRONG_FOR_A_FOLDER.sub('_', record.subset)}"


def _copy_tokens(job: Job, piece: Piece, output: _Output, files: _StreamFiles) -> None:
    """A stretch of a .bin file. Its documents are counted by the token that each begins with."""
    tokens = read_bin_tokens(piece.path, piece.span.start, piece.span.stop)
    if len(tokens) and int(tokens.max()) >= job.vocab_size:
        raise UserError(
            f"{piece.path} holds token {int(tokens.max())}, and the vocabulary has {job.vocab_size}: "
            "it is damaged, or was made with another tokenizer (--tokenizer)."
        )
    documents = int((tokens == job.end_of_document).sum())
    output.streams[piece.split].documents += documents
    output.streams[piece.split].tokens += len(tokens)
    output.files.append({"name": piece.name, "documents": documents, "bytes": 0, "tokens": len(tokens)})
    files.write(piece.split, tokens.astype(job.dtype, copy=False))
