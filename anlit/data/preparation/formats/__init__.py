"""Source files, read record by record: .jsonl, .jsonl.zst, .parquet, plain text, and .bin token files.

    format_of(name) → Format      spans(path, span_bytes) → [Span]      read(path, span, columns) → Record, Record, …

A worker reads one span; a file's spans, one after the other, give every record of the file once.
Nothing here raises because of what a file holds: a fault is a `Record` with a `problem`, and reading continues
after it where the format allows it. Only OSError comes through (no such file, no permission, a failing disk).
"""

from collections.abc import Iterator
from pathlib import Path

from anlit.data.preparation.formats.base import Columns, Format, Record, Span
from anlit.data.preparation.formats.bin_tokens import read_bin_header, read_bin_tokens
from anlit.data.preparation.formats.json_lines import JsonLines, ZstdJsonLines
from anlit.data.preparation.formats.parquet import Parquet
from anlit.data.preparation.formats.plain_text import PlainText

__all__ = ["Columns", "Format", "Record", "Span", "format_of", "read_bin_header", "read_bin_tokens", "read_file"]

BY_ENDING: dict[str, Format] = {
    ".jsonl": JsonLines(),
    ".jsonl.zst": ZstdJsonLines(),
    ".parquet": Parquet(),
}
PLAIN_TEXT = PlainText()


def format_of(name: str) -> Format:
    """How to read a file of this name; an ending that is not known means plain text, one document a file."""
    return next((known for ending, known in BY_ENDING.items() if name.lower().endswith(ending)), PLAIN_TEXT)


def read_file(name: str, path: Path, span_bytes: int, columns: Columns) -> Iterator[Record]:
    """All records of a file, in order."""
    form = format_of(name)
    for span in form.spans(path, span_bytes):
        yield from form.read(path, span, columns)
