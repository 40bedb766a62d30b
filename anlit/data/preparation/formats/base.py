"""What all formats share: records, spans, and the checks that every document's text goes through."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """One document of a source file, or what is wrong with it."""

    where: str
    """Place in the file, counted from 1: "line 12", "row 512", "row group 3", "the file"."""
    text: str | None
    """None if it cannot be used; otherwise not empty and valid UTF-8 when encoded."""
    problem: str | None
    """None, or one of not_utf8, not_json, no_text_field, no_subset_field, empty, too_long, truncated, damaged."""
    detail: str
    """The problem in one clause, for an error message; empty without a problem."""
    subset: str | None
    """Value of the subset field, where `Columns` names one."""
    size: int = 0
    """UTF-8 bytes of `text`."""


@dataclass(frozen=True)
class Span:
    """A stretch of a file that can be read alone."""

    start: int
    stop: int
    """Bytes [start, stop) of the file, both at line starts; of parquet: row groups [start, stop)."""
    first_record: int
    """Index of its first record."""


@dataclass(frozen=True)
class Columns:
    """Which fields to read."""

    text: str = "text"
    subset: str | None = None
    """Dots lead into nested fields: "meta.redpajama_set_name"."""
    max_document_bytes: int = 32 * MB
    """Longer texts (UTF-8) are reported as too_long."""


class Format(ABC):
    """How one kind of file is cut and read. Without state: an instance may go to other processes."""

    @abstractmethod
    def spans(self, path: Path, span_bytes: int) -> list[Span]:
        """Cut a file into stretches of about `span_bytes` bytes; one stretch where it cannot be cut.

        Raises:
            OSError: the file cannot be read.
        """

    @abstractmethod
    def read(self, path: Path, span: Span, columns: Columns) -> Iterator[Record]:
        """Records of one span, in order, streamed: memory is bounded by a few times the longest document.

        Raises:
            OSError: the file cannot be read.
        """


class BrokenFileError(Exception):
    """What follows in a file cannot be decoded; `read` turns it into a record."""

    def __init__(self, problem: str, detail: str):
        super().__init__(detail)
        self.problem, self.detail = problem, detail


def bad_record(where: str, problem: str, detail: str) -> Record:
    return Record(where, None, problem, detail, None)


def record_of(where: str, text: object, subset: object, columns: Columns) -> Record:
    """The record of field values as they were found: text as str, UTF-8 bytes, or something wrong."""
    if not isinstance(text, str | bytes):
        return bad_record(where, "no_text_field", f'the field "{columns.text}" is {_kind(text)} and not a string')
    try:
        size = _utf8_bytes(text)
        if size > columns.max_document_bytes:
            return bad_record(where, "too_long", too_long(size, columns))
        text = text if isinstance(text, str) else text.decode()
        subset = subset.decode() if isinstance(subset, bytes) else subset
    except UnicodeError as error:
        return bad_record(where, "not_utf8", not_utf8(error))
    if not text:
        return bad_record(where, "empty", "its text is empty")
    if columns.subset is not None and not (isinstance(subset, str) and subset):
        detail = f'the field "{columns.subset}" is {_kind(subset)} and not a name'
        return bad_record(where, "no_subset_field", detail)
    return Record(where, text, None, "", subset if isinstance(subset, str) else None, size)


def too_long(size: int, columns: Columns) -> str:
    return f"its text has {size:,} bytes, more than --max_document_bytes {columns.max_document_bytes}"


def not_utf8(error: UnicodeError) -> str:
    """One clause; `error` comes from decoding bytes, or from encoding a text with half of a surrogate pair."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.object[error.start]:#04x} at position {error.start + 1} is not valid UTF-8"
    return "its text has half of a surrogate pair, which UTF-8 cannot express"


def _utf8_bytes(text: str | bytes) -> int:
    if isinstance(text, bytes) or text.isascii():
        return len(text)
    return len(text.encode())


def _kind(value: object) -> str:
    """A wrong value in words."""
    if value is None:
        return "missing or null"
    if value == "":
        return "empty"
    names = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"of type {type(value).__name__}")
