"""Corpora that are prepared once per session, and folders in memory."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from anlit.data.preparation.recipes import Recipe
from tests.data import layouts
from tests.data.layouts import short_documents
from tests.data.prepared import random_tokens, write_prepared
from tests.data.preparing import SIZES, make, recipe_of, record_times, scratch, train_tokenizer


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with scratch() as folder:
        yield folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The folder of the source files, which a test writes."""
    return tmp_path / "source"


@pytest.fixture(scope="session")
def session_folder() -> Iterator[Path]:
    with scratch() as folder:
        yield folder


@pytest.fixture(scope="session")
def tokenizer(session_folder: Path) -> str:
    """A tokenizer.json of 800 tokens."""
    return str(train_tokenizer(session_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def recipe(session_folder: Path, tokenizer: str) -> Recipe:
    """A recipe for 50 documents in several tasks; nine documents are held out."""
    layouts.openwebtext(
        session_folder / "hub", short_documents(50, seed=1), n_files=4, row_group_size=4
    )
    return recipe_of(
        "OpenWebText", session_folder / "hub", SIZES, tokenizer=tokenizer, val_fraction=0.2
    )


@pytest.fixture(scope="session")
def finished(session_folder: Path, recipe: Recipe) -> Path:
    make(session_folder / "finished", recipe)
    assert len(record_times(session_folder / "finished")) > 4
    return session_folder / "finished"


@pytest.fixture(scope="session")
def tiny_shards(session_folder: Path) -> str:
    """A prepared folder of texts with many numbers: vocabulary 320, about 50,000 tokens."""
    from anlit import TextFiles

    path = str(session_folder / "tiny")
    texts = []
    for factor, text in enumerate(short_documents(50, seed=6), start=7):
        words = [f"word{number * factor % 1000}" for number in range(120)]
        texts.append(" ".join(words) + text[:500])
    source = str(layouts.text_files(session_folder / "text", texts))
    TextFiles(source, path, vocab_size=320, val_fraction=0.2).prepare_data()
    return path


@pytest.fixture(scope="session")
def streams() -> dict[str, np.ndarray]:
    return {"train": random_tokens(46_000, seed=0), "val": random_tokens(5_000, seed=1)}


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, streams: dict[str, np.ndarray]) -> str:
    """A prepared folder by the independent writer: seven chunks to train on, vocabulary 320."""
    folder = tmp_path_factory.mktemp("prepared") / "plain"
    write_prepared(folder, streams, chunk_tokens=7001)
    return str(folder)


@pytest.fixture
def shards_copy(prepared: str, tmp_path: Path) -> Path:
    shutil.copytree(prepared, tmp_path / "shards")
    return tmp_path / "shards"


@pytest.fixture(scope="session")
def subsets(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, np.ndarray]]:
    """A prepared folder of a corpus with three subsets of different sizes, and their tokens."""
    folder = tmp_path_factory.mktemp("prepared") / "subsets"
    sizes = {
        "train/web": 20_000,
        "train/code": 9_000,
        "train/books": 3_000,
        "val/web": 1_500,
        "val/books": 700,
    }
    tokens = {name: random_tokens(size, seed=10 + size) for name, size in sizes.items()}
    return str(folder), write_prepared(folder, tokens, chunk_tokens=2500)
