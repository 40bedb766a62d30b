"""The tasks of a preparation, what all tasks share, and the split of a document.

    DIR/<stream>/chunk-TTTTTT-NNN.bin     chunk N of task T, in litdata's format
    DIR/tasks/TTTTTT.json                 record of task T: counts, checksums, skipped documents

A stream is a split ("val"), or a split and a subset ("train/RedPajamaC4").
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from anlit.data.preparation.formats import n_pieces_of
from anlit.data.preparation.formats.text import Columns
from anlit.data.preparation.recipes import Recipe
from anlit.data.preparation.sources import CorpusFiles, SourceFile, is_held_out
from anlit.data.storage.manifest import TASKS, TRAIN, VAL
from anlit.errors import UserError

COUNT_KEYS = ("documents", "bytes", "tokens")
"""What records and manifest count, of streams and of source files."""
SKIPPED_LISTED = 1000
"""Skipped documents that a record or the manifest lists, at most."""
PROGRESS_KEPT = "what is done so far is kept"


class Piece(NamedTuple):
    """A source file, or a piece of a large file."""

    file: SourceFile
    number: int  # from 0
    n_pieces: int  # of the file

    @property
    def label(self) -> str | None:
        """Which piece of the file it is, such as "2 of 5". None for a complete file."""
        return f"{self.number + 1} of {self.n_pieces}" if self.n_pieces > 1 else None


class Task(NamedTuple):
    """What a worker encodes at once."""

    number: int
    pieces: tuple[Piece, ...]
    size: int  # bytes of the source files, for the progress bar


@dataclass(frozen=True)
class Job:
    """What all tasks of a preparation have in common. It is sent to the workers."""

    folder: Path
    recipe: Recipe
    source: CorpusFiles  # fetches files; tasks never list them
    tokenizer_sha256: str | None
    vocab_size: int
    end_of_document: int  # token id
    skip_bad: bool

    @property
    def dtype(self) -> np.dtype:
        """The smallest type that holds all token ids."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<i4")


def tasks_of(files: list[SourceFile], recipe: Recipe) -> list[Task]:
    """Cut files into tasks of at least `task_bytes`. The result depends on names and sizes only."""
    tasks: list[Task] = []
    pieces: list[Piece] = []
    size = 0
    for file in files:
        if recipe.is_tokenized:
            n_pieces = max(1, file.size // recipe.task_bytes)
        else:
            n_pieces = n_pieces_of(file.name, file.size, recipe.task_bytes)
        for number in range(n_pieces):
            pieces.append(Piece(file, number, n_pieces))
            size += file.size // n_pieces
            is_last = file is files[-1] and number == n_pieces - 1
            if size >= recipe.task_bytes or is_last:
                tasks.append(Task(len(tasks), tuple(pieces), size))
                pieces = []
                size = 0
    return tasks


def record_path(folder: Path, task: int) -> Path:
    return folder / TASKS / f"{task:06d}.json"


def chunk_name(task: int, number: int) -> str:
    return f"chunk-{task:06d}-{number:03d}.bin"


def columns_of(recipe: Recipe) -> Columns:
    """Return which fields of the source files are read."""
    return Columns(recipe.text_field, recipe.subset_field, recipe.max_document_bytes)


def split_of_file(recipe: Recipe, file: SourceFile) -> str:
    """Return the split of a file's documents, unless they are held out by their hash."""
    if file.split is not None:
        return file.split
    for beginning, split in recipe.split_folders.items():
        if file.name.startswith(beginning):
            return split
    return TRAIN


def split_of_document(recipe: Recipe, file: SourceFile, text: str) -> str:
    """Return the split of a document, before `val_tokens` of the first task are held out."""
    if file.split is None and recipe.val_fraction:
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        if is_held_out(sha256, recipe.val_fraction):
            return VAL
    return split_of_file(recipe, file)


def bad_document(description: str) -> UserError:
    """Return the error for a document that cannot be used and may not be left out."""
    return UserError(
        f"{description}: repair the file, or leave such documents out with anlit prepare's "
        f"--on_bad skip; {PROGRESS_KEPT}"
    )
