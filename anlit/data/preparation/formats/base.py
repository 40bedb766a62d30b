"""What all formats share: records, the checks of every document's text, and the bytes of plain, .gz and .zst files."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

MB = 1 << 20
COMPRESSED_PIECE_BYTES = MB // 64  # read at once: repetitive text is thousands of times longer
LARGEST_WINDOW = 1 << 31  # what `zstd --long=31` writes; memory is taken only if a file asks for it
# Not `stream_reader`, which takes a cut file for a whole one, nor `gzip.open`, which loses what came before the cut.
FRAMES: dict[str, Callable[[], Any]] = {
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj(),
    ".gz": lambda: zlib.decompressobj(wbits=31),
}
Place = tuple[str, int, Callable[[], int] | None]
"""Unit ("line", "row"), number from 1, and what counts the units before the first."""
THE_FILE: Place = ("the file", 0, None)


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
        return _wrong_field(place, "no_text_field", columns.text, text, "string")
    try:
        size = len(text) if isinstance(text, bytes) or text.isascii() else len(text.encode())
        if size > columns.max_document_bytes:
            return too_long(place, size, columns)
        text = text if isinstance(text, str) else text.decode()
        subset = subset.decode() if isinstance(subset, bytes) else subset
    except UnicodeError as error:
        return Record(place, None, "not_utf8", f"it is not UTF-8 ({error})")
    if not text:
        return Record(place, None, "empty", "its text is empty")
    if columns.subset is not None and not (isinstance(subset, str) and subset):
        return _wrong_field(place, "no_subset_field", columns.subset, subset, "name")
    return Record(place, text, subset=subset if isinstance(subset, str) else None, size=size)


def _wrong_field(place: Place, problem: str, field: str, value: object, wanted: str) -> Record:
    shown = "missing or null" if value is None else f"{value!r:.40}"
    return Record(place, None, problem, f'the field "{field}" is {shown} and not a {wanted}')


def too_long(place: Place, size: int, columns: Columns) -> Record:
    """The record of a document that has `size` bytes."""
    detail = f"it has {size:,} bytes, more than --max_document_bytes {columns.max_document_bytes}"
    return Record(place, None, "too_long", detail)


def read_bytes(name: str, path: Path) -> Iterator[bytes]:
    """The decompressed bytes of a file, in pieces; BrokenFileError after everything that could be decoded."""
    new_frame, size = FRAMES.get(Path(name).suffix.lower()), path.stat().st_size
    if new_frame is None:
        return read_range(path, 0, size)
    return _decompressed(read_range(path, 0, size, COMPRESSED_PIECE_BYTES), size, new_frame)


def read_range(path: Path, start: int, stop: int, piece_bytes: int = MB) -> Iterator[bytes]:
    """Bytes [start, stop) of a file as they are, in pieces."""
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < stop and (piece := file.read(min(piece_bytes, stop - start))):
            start += len(piece)
            yield piece


def _decompressed(
    pieces: Iterator[bytes], size: int, new_frame: Callable[[], Any]
) -> Iterator[bytes]:
    """One or several compressed frames, one after the other."""
    frame: Any = None
    position = 0
    for piece in pieces:
        position += len(piece)
        while piece:
            frame = frame or new_frame()
            try:
                text = frame.decompress(piece)
            except (zstandard.ZstdError, zlib.error) as error:
                where = f"the compressed data is damaged before byte {position:,}"
                raise BrokenFileError(
                    "damaged", f"{where} ({error}), all that follows is lost"
                ) from error
            if text:
                yield text
            piece = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None or size == 0:
        cut = "ends in the middle of its compressed data" if size else "is empty"
        raise BrokenFileError(
            "truncated", f"the file {cut} (byte {size:,}), all that follows is lost"
        )
