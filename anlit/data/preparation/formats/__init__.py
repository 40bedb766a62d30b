"""Source files, read document by document: JSON lines, parquet, plain text, also as .gz or .zst.

Readers raise OSError only. If a content is wrong, they give a `Record` with a `problem` and go on.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from anlit.data.preparation.formats import parquet, text
from anlit.data.preparation.formats.text import FRAMES, THE_FILE, Columns, Record, foreign_file

JSON_LINES = (".json", ".jsonl", ".jsonlines", ".ndjson")
"""Endings of JSON lines. The hub's .json files are mostly JSON lines too."""
MANY_DOCUMENTS = re.compile(
    rf"(\.parquet|({'|'.join(map(re.escape, JSON_LINES))})(\.(gz|zst))?)$", re.IGNORECASE
)
"""The names of files that hold many documents."""


def is_one_text(name: str) -> bool:
    """Whether a file of this name is a single document, and is not compressed."""
    return not MANY_DOCUMENTS.search(name) and not name.lower().endswith(tuple(FRAMES))


def n_pieces_of(name: str, size: int, piece_bytes: int) -> int:
    """Return into how many pieces of `piece_bytes` or more a file of `size` bytes is cut."""
    can_be_cut = name.lower().endswith((*JSON_LINES, ".parquet"))
    return max(1, size // piece_bytes) if can_be_cut else 1


def read_file(
    name: str, path: Path, columns: Columns, piece: int = 0, n_pieces: int = 1
) -> Iterator[Record]:
    """Yield the records of a piece of a file, in order.

    Args:
        name: its ending says which format the file has.
        piece: number of the piece, from 0.
        n_pieces: from `n_pieces_of`.
    """
    foreign = foreign_file(name, path)
    if foreign is not None:
        if piece == 0:  # once per file
            yield Record(THE_FILE, None, "wrong_format", f"it is {foreign}")
    elif name.lower().endswith(".parquet"):
        yield from parquet.read_rows(path, columns, piece, n_pieces)
    elif MANY_DOCUMENTS.search(name):
        yield from text.read_lines(name, path, columns, piece, n_pieces)
    else:
        yield from text.read_plain(name, path, columns)
