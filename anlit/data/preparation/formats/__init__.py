"""Source files of text, read record by record: JSON lines, parquet, plain text; .gz and .zst of lines and plain text.

Only OSError is raised: what is wrong with a file's content is a `Record` with a `problem`, after which reading goes on.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from anlit.data.preparation.formats import parquet, text
from anlit.data.preparation.formats.base import FRAMES, Columns, Record

__all__ = ["Columns", "Record", "is_one_text", "parts_of", "read_file"]
MANY = re.compile(r"\.(parquet|jsonl?(\.(gz|zst))?)$", re.IGNORECASE)
"""The names of files that hold many documents. Those called .json on the hub are mostly JSON lines too."""


def is_one_text(name: str) -> bool:
    """Whether a file of this name is a document as it is: neither one that holds many, nor compressed."""
    return not MANY.search(name) and not name.lower().endswith(tuple(FRAMES))


def parts_of(name: str, size: int, part_bytes: int) -> int:
    """Into how many parts a text file of `size` bytes is cut, each of at least `part_bytes` unless there is but one."""
    return (
        max(1, size // part_bytes) if name.lower().endswith((".json", ".jsonl", ".parquet")) else 1
    )


def read_file(
    name: str, path: Path, columns: Columns, part: int = 0, parts: int = 1
) -> Iterator[Record]:
    """The records of one part of a file, in order. `name` says what the file is, `parts_of` how many `parts`."""
    if name.lower().endswith(".parquet"):
        return parquet.read(path, columns, part, parts)
    if MANY.search(name):
        return text.read_lines(name, path, columns, part, parts)
    return text.read_plain(name, path, columns)
