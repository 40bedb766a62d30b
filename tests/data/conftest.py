"""A small corpus with everything that goes wrong in real ones, prepared once per session."""

import random
from pathlib import Path

import pytest

from anlit.data import TextFiles

WORDS = ["the", "norm", "of", "a", "row", "is", "one", "größe", "naïve", "日本語", "and", "x = 1\n", "\t\r\n", "🙂"]


def write_corpus(folder: Path, n_files: int = 60) -> Path:
    """Files of 50 to 900 words; some are copies, empty, not UTF-8 or name the special token."""
    rng = random.Random(0)
    folder.mkdir(parents=True)
    for index in range(n_files):
        words = [rng.choice(WORDS) + str(rng.randrange(30)) for _ in range(rng.randrange(50, 900))]
        part = folder / f"part{index % 3}"
        part.mkdir(exist_ok=True)
        (part / f"{index}.txt").write_bytes(" ".join(words).encode())
    (folder / "special.txt").write_text("a text that says <|endoftext|> and goes on " * 20, encoding="utf-8")
    (folder / "copy.txt").write_bytes((folder / "special.txt").read_bytes())
    (folder / "empty.txt").write_bytes(b"")
    (folder / "latin1.txt").write_bytes("größe".encode("latin-1"))
    (folder / "other.md").write_text("not asked for", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the small corpus's text files."""
    return write_corpus(tmp_path_factory.mktemp("tiny") / "text")


@pytest.fixture(scope="session")
def tiny_shards(tiny_text: Path) -> str:
    """Prepared folder of the small corpus: vocabulary 320, about 20,000 tokens."""
    path = str(tiny_text.parent / "shards")
    TextFiles(str(tiny_text), path, vocab_size=320, val_fraction=0.2).prepare_data()
    return path
