"""Plain text: one file is one document."""

from collections.abc import Iterator
from pathlib import Path

from anlit.data.preparation.formats.base import Columns, Format, Record, Span, bad_record, record_of, too_long


class PlainText(Format):
    def spans(self, path: Path, span_bytes: int) -> list[Span]:
        return [Span(0, path.stat().st_size, 0)]

    def read(self, path: Path, span: Span, columns: Columns) -> Iterator[Record]:
        size = path.stat().st_size
        if size > columns.max_document_bytes:
            yield bad_record("the file", "too_long", too_long(size, columns))
        else:
            yield record_of("the file", path.read_bytes(), None, columns)
