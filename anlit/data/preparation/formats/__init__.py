"""Source files of text, read record by record: JSON lines, parquet, plain text; .gz and .zst of lines and plain text.

Only OSError is raised: what is wrong with a file's content is a `Record` with a `problem`, after which reading goes on.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from anlit.data.preparation.formats import parquet, text
from anlit.data.preparation.formats.base import FRAMES, THE_FILE, Columns, Record, foreign_file

__all__ = ["Columns", "Record", "is_one_text", "parts_of", "read_file"]
LINES = (".json", ".jsonl", ".jsonlines", ".ndjson")
MANY = re.compile(rf"(\.parquet|({'|'.join(map(re.escape, LINES))})(\.(gz|zst))?)$", re.IGNORECASE)
"""The names of files that hold many documents. Those called .json on the hub are mostly JSON lines too."""


def is_one_text(name: str) -> bool:
    """Whether a file of this name is a document as it is: neither one that holds many, nor compressed."""
    return not MANY.search(name) and not name.lower().endswith(tuple(FRAMES))


def parts_of(name: str, size: int, part_bytes: int) -> int:
    """Into how many parts a text file of `size` bytes is cut, each of at least `part_bytes` unless there is but one."""
    has_parts = name.lower().endswith((*LINES, ".parquet"))
    return max(1, size // part_bytes) if has_parts else 1


def read_file(
    name: str, path: Path, columns: Columns, part: int = 0, parts: int = 1
) -> Iterator[Record]:
    """The records of one part of a file, in order. `name` says what the file is, `parts_of` how many `parts`."""
    foreign = foreign_file(name, path)
    if foreign is not None:
        if part == 0:  # once for the file
            yield Record(THE_FILE, None, "wrong_format", f"it is {foreign}")
    elif name.lower().endswith(".parquet"):
        yield from parquet.read(path, columns, part, parts)
    elif MANY.search(name):
        yield from text.read_lines(name, path, columns, part, parts)
    else:
        yield from text.read_plain(name, path, columns)
