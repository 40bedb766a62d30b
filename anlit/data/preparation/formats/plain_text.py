"""Plain text: one file is one document."""

from collections.abc import Iterator
from pathlib import Path

from anlit.data.preparation.formats.base import BrokenFileError, Columns, Record, bad_record, record_of, too_long
from anlit.data.preparation.formats.compressed import read_bytes

THE_FILE = ("the file", 0, None)


def read(name: str, path: Path, columns: Columns) -> Iterator[Record]:
    """The one record of a file; of a compressed one, no more is decompressed than a document may have."""
    text = bytearray()
    try:
        for piece in read_bytes(name, path):
            text += piece
            if len(text) > columns.max_document_bytes:
                size = max(len(text), path.stat().st_size)
                yield bad_record(THE_FILE, "too_long", too_long(size, columns))
                return
        yield record_of(THE_FILE, bytes(text), None, columns)
    except BrokenFileError as error:
        yield bad_record(THE_FILE, error.problem, error.detail)
