"""Source files of text, read record by record: JSON lines, parquet, plain text; .gz and .zst of lines and plain text.

Only OSError is raised: what is wrong with a file's content is a `Record` with a `problem`, after which reading goes on.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from anlit.data.preparation.formats import parquet, text
from anlit.data.preparation.formats.base import Columns, Record

__all__ = ["Columns", "Record", "holds_many", "parts_of", "read_file"]


def holds_many(name: str) -> bool:
    """Whether a file of this name holds many documents; another is plain text, one document."""
    return re.search(r"\.(parquet|jsonl|jsonl?\.(gz|zst))$", name, re.IGNORECASE) is not None


def parts_of(name: str, size: int, part_bytes: int) -> int:
    """Into how many parts a text file of `size` bytes is cut, each of at least `part_bytes` unless there is but one."""
    return max(1, size // part_bytes) if name.lower().endswith((".jsonl", ".parquet")) else 1


def read_file(name: str, path: Path, columns: Columns, part: int = 0, parts: int = 1) -> Iterator[Record]:
    """The records of one part of a file, in order. `name` says what the file is, `parts_of` how many `parts`."""
    if name.lower().endswith(".parquet"):
        return parquet.read(path, columns, part, parts)
    if holds_many(name):
        return text.read_lines(name, path, columns, part, parts)
    return text.read_plain(name, path, columns)
