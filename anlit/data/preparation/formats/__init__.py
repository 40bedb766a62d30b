"""Source files, read record by record: JSON lines, parquet, plain text (each also as .gz or .zst), .bin token files.

Nothing here raises because of what a file holds: a fault is a `Record` with a `problem`, and reading continues
after it where the format allows it. Only OSError comes through (no such file, no permission, a failing disk).
"""

from collections.abc import Iterator
from pathlib import Path

from anlit.data.preparation.formats import json_lines, parquet
from anlit.data.preparation.formats.base import BrokenFileError, Columns, Record, record_of, too_long
from anlit.data.preparation.formats.bin_tokens import read_bin_tokens
from anlit.data.preparation.formats.compressed import read_bytes, without_compression

__all__ = ["Columns", "Record", "holds_many", "parts_of", "read_bin_tokens", "read_file"]
THE_FILE = ("the file", 0, None)


def holds_many(name: str) -> bool:
    """Whether a file of this name holds many documents; another is plain text, one document."""
    plain = without_compression(name)
    return plain.endswith((".jsonl", ".parquet")) or (plain != name.lower() and plain.endswith(".json"))


def parts_of(name: str, size: int, part_bytes: int) -> int:
    """Into how many parts a text file of `size` bytes is cut, each of at least `part_bytes` unless there is but one."""
    return max(1, size // part_bytes) if name.lower().endswith((".jsonl", ".parquet")) else 1


def read_file(name: str, path: Path, columns: Columns, part: int = 0, parts: int = 1) -> Iterator[Record]:
    """The records of one part of a file, in order; all parts together have every record once.

    Streamed: memory is bounded by a few times the longest document. The ending of `name` says what the file is; `parts`
    is 1 or what `parts_of` says.
    """
    if name.lower().endswith(".parquet"):
        return parquet.read(path, columns, part, parts)
    if holds_many(name):
        return json_lines.read(name, path, columns, part, parts)
    return _read_text(name, path, columns)


def _read_text(name: str, path: Path, columns: Columns) -> Iterator[Record]:
    """The one record of a plain text; of a compressed one, no more is decompressed than a document may have."""
    text = bytearray()
    try:
        for piece in read_bytes(name, path):
            text += piece
            if len(text) > columns.max_document_bytes:
                size = max(len(text), path.stat().st_size)
                yield Record(THE_FILE, None, "too_long", too_long(size, columns))
                return
        yield record_of(THE_FILE, bytes(text), None, columns)
    except BrokenFileError as error:
        yield Record(THE_FILE, None, *error.args)
