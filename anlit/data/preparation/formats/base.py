"""What all formats share: records, the checks of every document's text, and the bytes of plain, .gz and .zst files."""

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import zstandard

MB = 1 << 20
MOST_LISTED, MOST_SHOWN = 12, 200  # names of fields in a sentence, and their characters
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

PEEKED_BYTES = 512
FOREIGN = (
    (rb"version https://git-lfs\.github\.com/spec/", "a Git LFS pointer and not the file itself: run `git lfs pull`"),
    (rb"\xff\xfe|\xfe\xff", "UTF-16 and not UTF-8: convert it with `iconv -f UTF-16 -t UTF-8`"),
    (rb"([^\0]\0){8}|(\0[^\0]){8}", "UTF-16 without a mark and not UTF-8: convert it with `iconv`"),
    (rb"BZh[1-9]1AY&SY", "compressed with bzip2, which is not read: decompress it, or use .gz or .zst"),
    (rb"\xfd7zXZ\0", "compressed with xz, which is not read: decompress it, or use .gz or .zst"),
    (rb"\x1f\x8b\x08", "compressed with gzip, and its name does not end in .gz: rename it"),
    (rb"\x28\xb5\x2f\xfd", "compressed with zstd, and its name does not end in .zst: rename it"),
    (rb"PK\x03\x04", "a zip archive, which is not read: unpack it"),
    (rb"[\s\S]{257}ustar", "a tar archive, which is not read: unpack it"),
)  # fmt: skip
"""How files of other formats begin, as regular expressions, and what they are and need."""


@dataclass(frozen=True, slots=True)
class Record:
    """One document of a source file, or what is wrong with it."""

    place: Place
    text: str | None  # None if it cannot be used; otherwise not empty and valid UTF-8 when encoded
    problem: str | None = None
    """None, or one of not_utf8, not_json, no_text_field, no_subset_field, empty, too_long, truncated, damaged,
    wrong_format."""
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
    lists: bool = False  # a list, such as of messages, is a text too: its JSON


class BrokenFileError(Exception):
    """What follows in a file cannot be decoded; reading turns it into a record. Its arguments: problem and detail."""


def foreign_format(content: bytes) -> str | None:
    """What a content that is no text is and what to do with it, by its first `PEEKED_BYTES`; None for all others."""
    for beginning, what in FOREIGN:
        if re.match(beginning, content[:PEEKED_BYTES]):
            return what
    return None


def foreign_file(name: str, path: Path) -> str | None:
    """What a file, decompressed by its name, is if it is not what its name says."""
    with open(path, "rb") as file:
        content = file.read(PEEKED_BYTES)
    is_compressed = Path(name).suffix.lower() in FRAMES
    if is_compressed and not content.startswith(b"version "):
        try:
            content = next(read_bytes(name, path), b"")
        except BrokenFileError:
            return None  # reading it will tell
    return foreign_format(content)


def record_of(
    place: Place, text: object, subset: object, columns: Columns, fields: Iterable[str] = ()
) -> Record:
    """The record of field values as they were found: text as str, UTF-8 bytes, or something wrong.

    `fields` are the names of all fields, for those who have named a wrong one.
    """
    if columns.lists and isinstance(text, list):
        text = json.dumps(text, ensure_ascii=False)
    if not isinstance(text, str | bytes):
        names = list(islice(fields, MOST_LISTED)) if text is None else []
        listed = f" (its fields: {', '.join(names)})"[:MOST_SHOWN] if names else ""
        record = _wrong_field(place, "no_text_field", columns.text, text, "string")
        return replace(record, detail=record.detail + listed)
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
    is_first = True
    for piece in pieces:
        position += len(piece)
        while piece:
            if frame is None:
                if not is_first:
                    piece = piece.lstrip(b"\0")  # tapes and block devices fill up with zeros
                    if not piece:
                        break
                frame = new_frame()
                is_first = False
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
