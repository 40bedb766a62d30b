"""What all formats share: records, and the checks that every document's text goes through."""

from collections.abc import Callable
from dataclasses import dataclass

MB = 1 << 20
KINDS = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
Place = tuple[str, int, Callable[[], int] | None]
"""Unit ("line", "row"; "the file" without a number), number from 1, and what counts the units before the first."""


@dataclass(frozen=True, slots=True)
class Record:
    """One document of a source file, or what is wrong with it."""

    place: Place
    text: str | None  # None if it cannot be used; otherwise not empty and valid UTF-8 when encoded
    problem: str | None = None
    """None, or one of not_utf8, not_json, no_text_field, no_subset_field, empty, too_long, truncated, damaged."""
    detail: str = ""  # the problem in one clause, for an error message
    subset: str | None = None  # value of the subset field, where `Columns` names one
    size: int = 0  # UTF-8 bytes of `text`

    @property
    def where(self) -> str:
        """Place in the file, counted from 1: "line 12", "row 512", "row group 3", "the file"."""
        unit, number, earlier = self.place
        return f"{unit} {number + (earlier() if earlier else 0)}" if number else unit


@dataclass(frozen=True)
class Columns:
    """Which fields to read."""

    text: str = "text"
    subset: str | None = None  # dots lead into nested fields: "meta.redpajama_set_name"
    max_document_bytes: int = 32 * MB  # longer texts (UTF-8) are reported as too_long


class BrokenFileError(Exception):
    """What follows in a file cannot be decoded; reading turns it into a record. Its arguments: problem and detail."""


def record_of(place: Place, text: object, subset: object, columns: Columns) -> Record:
    """The record of field values as they were found: text as str, UTF-8 bytes, or something wrong."""
    if not isinstance(text, str | bytes):
        return Record(place, None, "no_text_field", f'the field "{columns.text}" is {_kind(text)} and not a string')
    try:
        size = len(text) if isinstance(text, bytes) or text.isascii() else len(text.encode())
        if size > columns.max_document_bytes:
            return Record(place, None, "too_long", too_long(size, columns))
        text = text if isinstance(text, str) else text.decode()
        subset = subset.decode() if isinstance(subset, bytes) else subset
    except UnicodeError as error:
        return Record(place, None, "not_utf8", not_utf8(error))
    if not text:
        return Record(place, None, "empty", "its text is empty")
    if columns.subset is not None and not (isinstance(subset, str) and subset):
        return Record(place, None, "no_subset_field", f'the field "{columns.subset}" is {_kind(subset)} and not a name')
    return Record(place, text, subset=subset if isinstance(subset, str) else None, size=size)


def too_long(size: int, columns: Columns) -> str:
    return f"its text has {size:,} bytes, more than --max_document_bytes {columns.max_document_bytes}"


def not_utf8(error: UnicodeError) -> str:
    """One clause; `error` comes from decoding bytes, or from encoding a text with half of a surrogate pair."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.object[error.start]:#04x} at position {error.start + 1} is not valid UTF-8"
    return "its text has half of a surrogate pair, which UTF-8 cannot express"


def _kind(value: object) -> str:
    """A wrong value in words."""
    if value is None:
        return "missing or null"
    return "empty" if value == "" else KINDS.get(type(value), f"of type {type(value).__name__}")
