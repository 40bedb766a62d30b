"""For the tests of `anlit prepare`: small sizes, a tokenizer, preparations that are interrupted."""

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from anlit.data.preparation import executors, recipes
from anlit.data.preparation.encode import encode_task
from anlit.data.preparation.prepare import prepare
from anlit.data.preparation.recipes import Recipe
from anlit.data.preparation.tasks import Job, Task
from tests.data.layouts import END_OF_DOCUMENT, documents
from tests.data.reader import hashes

SMALL: dict[str, Any] = {"task_bytes": 20_000, "chunk_bytes": 10_001}
"""Sizes that give several tasks and chunks."""
SIZES: dict[str, Any] = {"task_bytes": 6_000, "chunk_bytes": 10_001}
"""Sizes that give many tasks in a corpus of 50 documents."""


def recipe_of(
    corpus: str, source: Path | None, sizes: Mapping[str, int] = SMALL, **options: Any
) -> Recipe:
    """Return a corpus's recipe with sizes so small that a few documents make several tasks."""
    folder = None if source is None else str(source)
    return replace(recipes.recipe_of(corpus, source=folder, **options), **sizes)


def make(folder: Path, recipe: Recipe, workers: int = 1, **options: Any) -> dict[str, Any]:
    return prepare(folder, recipe, "anlit prepare", workers=workers, **options)


def assert_makes(folder: Path, recipe: Recipe, like: Path, **options: Any) -> None:
    """The recipe makes `folder` the same as the folder `like`."""
    make(folder, recipe, **options)
    assert hashes(folder) == hashes(like), folder


def train_tokenizer(path: Path, vocab_size: int = 800) -> Path:
    """Write a byte-level BPE; its end-of-document token is the last, as GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False
    )
    texts = [text[:2000] for text in documents(60, seed=7)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    assert tokenizer.token_to_id(END_OF_DOCUMENT) == vocab_size - 1
    tokenizer.save(str(path))
    return path


def record_times(folder: Path) -> dict[int, int]:
    """Return when the record of each finished task was written."""
    records = (folder / "tasks").glob("0*.json")
    return {int(path.stem): path.stat().st_mtime_ns for path in records}


def interrupt(folder: Path, recipe: Recipe, tasks: int) -> None:
    """Prepare `folder`, and interrupt that after so many tasks."""
    numbers = itertools.count()

    def encode_or_stop(job: Job, task: Task) -> int:
        if next(numbers) == tasks:
            raise KeyboardInterrupt
        return encode_task(job, task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "encode_task", encode_or_stop)
        with pytest.raises(KeyboardInterrupt):
            make(folder, recipe)
    assert len(record_times(folder)) == tasks


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder in memory if there is room: preparing waits for the disk at every step."""
    memory = "/dev/shm"
    n_free_bytes = shutil.disk_usage(memory).free if os.access(memory, os.W_OK) else 0
    has_room = n_free_bytes > 1 << 30
    with tempfile.TemporaryDirectory(dir=memory if has_room else None) as folder:
        yield Path(folder)
