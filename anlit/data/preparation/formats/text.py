"""Records of documents, and two formats: plain text (a document per file) and JSON lines.

A line of JSON lines is an object with a text, or blank. Both formats may be compressed (.gz, .zst).
"""

import codecs
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

MB = 1 << 20
FIELDS_SHOWN = 200
"""Characters of the fields' names in an error message, at most."""
COMPRESSED_BUFFER_BYTES = MB // 64
"""Compressed bytes that are read at once: repetitive text is thousands of times longer."""
LARGEST_WINDOW = 1 << 31
"""What `zstd --long=31` writes. Memory is taken only if a file asks for it."""
# `stream_reader` takes a cut file for a complete file, and `gzip.open` loses the text before a cut.
FRAMES: dict[str, Callable[[], Any]] = {
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj(),
    ".gz": lambda: zlib.decompressobj(wbits=31),
}
"""Endings of compressed files, and what decompresses a frame."""

PEEKED_BYTES = 512
"""The beginning of a file by which foreign formats are recognised."""
FOREIGN = (
    (
        rb"version https://git-lfs\.github\.com/spec/",
        "a Git LFS pointer and not the file itself: run `git lfs pull`",
    ),
    (rb"\xff\xfe|\xfe\xff", "UTF-16 and not UTF-8: convert it with `iconv -f UTF-16 -t UTF-8`"),
    (
        rb"([^\0]\0){8}|(\0[^\0]){8}",
        "UTF-16 without a mark and not UTF-8: convert it with `iconv`",
    ),
    (
        rb"BZh[1-9]1AY&SY",
        "compressed with bzip2, which is not read: decompress it, or use .gz or .zst",
    ),
    (
        rb"\xfd7zXZ\0",
        "compressed with xz, which is not read: decompress it, or use .gz or .zst",
    ),
    (rb"\x1f\x8b\x08", "compressed with gzip, and its name does not end in .gz: rename it"),
    (rb"\x28\xb5\x2f\xfd", "compressed with zstd, and its name does not end in .zst: rename it"),
    (rb"PK\x03\x04", "a zip archive, which is not read: unpack it"),
    (rb"[\s\S]{257}ustar", "a tar archive, which is not read: unpack it"),
)
"""Foreign formats: a regular expression for the beginning, then the format and its remedy."""


class Position(NamedTuple):
    """Where a document is in its file."""

    unit: str  # "line", "row", "row group", "the file"
    number: int  # from 1; 0 if the unit is the whole file
    count_earlier: Callable[[], int] | None = None  # counts the units before number 1


THE_FILE = Position("the file", 0)


@dataclass(frozen=True, slots=True)
class Record:
    """A document of a source file, or what is wrong with it."""

    position: Position
    text: str | None  # None if it cannot be used; otherwise not empty and valid UTF-8 when encoded
    problem: str | None = None
    """None, not_utf8, not_json, no_text_field, no_subset_field, empty, too_long, truncated,
    damaged or wrong_format."""
    detail: str = ""  # the problem in a clause, for an error message
    subset: str | None = None  # value of the subset field, if `Columns` names a field
    size: int = 0  # UTF-8 bytes of `text`

    @property
    def location(self) -> str:
        """Position in the file, counted from 1: "line 12", "row 512", "row group 3", "the file"."""
        unit, number, count_earlier = self.position
        if number == 0:
            return unit
        if count_earlier is not None:
            number += count_earlier()
        return f"{unit} {number}"


@dataclass(frozen=True)
class Columns:
    """Which fields to read."""

    text: str = "text"
    subset: str | None = None  # dots lead into nested fields: "meta.redpajama_set_name"
    max_document_bytes: int = 32 * MB  # longer texts (UTF-8) are reported as too_long
    lists: bool = False  # a list, such as of messages, is a text too: its JSON


class BrokenFileError(Exception):
    """The rest of a file cannot be decoded. Arguments: the problem and the detail of its record."""


def read_plain(name: str, path: Path, columns: Columns) -> Iterator[Record]:
    """Yield the record of a plain text, without its byte-order mark.

    Decompression stops at the longest document that is allowed.
    """
    text = bytearray()
    try:
        for buffer in read_bytes(name, path):
            text += buffer
            if len(text) > columns.max_document_bytes:
                yield _too_long(THE_FILE, max(len(text), path.stat().st_size), columns)
                return
        yield record_of(THE_FILE, bytes(text.removeprefix(codecs.BOM_UTF8)), None, columns)
    except BrokenFileError as error:
        yield Record(THE_FILE, None, *error.args)


def read_lines(
    name: str, path: Path, columns: Columns, piece: int, n_pieces: int
) -> Iterator[Record]:
    """Yield the records of JSON lines that begin in a piece, from byte size·piece/n_pieces on."""
    count_earlier = None
    if n_pieces == 1:
        buffers = read_bytes(name, path)
    else:
        size = path.stat().st_size
        start = _next_line(path, size * piece // n_pieces)
        stop = _next_line(path, size * (piece + 1) // n_pieces)
        buffers = read_range(path, start, stop)
        if piece > 0:  # counting reads the file up to here, so it is done only for an error message
            count_earlier = cache(partial(_count_lines, path, start))
    # Six bytes of JSON can stand for one byte of text (\u0041), and other fields need room too.
    longest = 8 * columns.max_document_bytes + MB
    number = 1
    try:
        for line in _split_lines(buffers, longest):
            position = Position("line", number, count_earlier)
            if isinstance(line, int):
                yield _too_long(position, line, columns)
            elif line.strip():
                if piece == 0 and number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                yield _parse_line(line, position, columns)
            number += 1
    except BrokenFileError as error:
        yield Record(Position("line", number, count_earlier), None, *error.args)


def _next_line(path: Path, position: int) -> int:
    """Return the position of the first line that begins at `position` or later."""
    if position == 0:
        return 0
    with open(path, "rb") as file:
        file.seek(position - 1)  # a line may begin right at it
        while (line := file.readline(MB)) and not line.endswith(b"\n"):
            pass
        return file.tell()


def _count_lines(path: Path, stop: int) -> int:
    """Count the lines in the first `stop` bytes of a file."""
    return sum(buffer.count(b"\n") for buffer in read_range(path, 0, stop))


def _split_lines(buffers: Iterator[bytes], longest: int) -> Iterator[bytes | int]:
    """Yield lines without "\\n", but only the size of a line longer than `longest`.

    If `buffers` raises, the unfinished line is dropped.
    """
    fragments: list[bytes] = []  # of the unfinished line
    size = 0
    for buffer in buffers:
        head, *lines = buffer.split(b"\n")
        fragments.append(head)
        size += len(head)
        if size > longest:
            fragments.clear()
        if lines:
            yield b"".join(fragments) if size <= longest else size
            *complete, tail = lines
            yield from complete
            fragments = [tail]
            size = len(tail)
    if size:
        yield b"".join(fragments) if size <= longest else size


def _parse_line(line: bytes, position: Position, columns: Columns) -> Record:
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Record(position, None, "not_utf8", f"it is not UTF-8 ({error})")
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        detail = f"the line is not JSON ({error}), each has to be an object"
        return Record(position, None, "not_json", detail)
    if not isinstance(values, dict):
        detail = "the line is JSON but not an object"
        return Record(position, None, "not_json", detail)
    text = _field_value(values, columns.text)
    subset = _field_value(values, columns.subset)
    return record_of(position, text, subset, columns, values)


def _field_value(values: Any, name: str | None) -> Any:
    """Return the value of the field `name`. If there is none, dots lead into nested fields."""
    if name in values:
        return values[name]
    for key in name.split(".") if name else ():
        values = values.get(key) if isinstance(values, dict) else None
    return values


def record_of(
    position: Position,
    text: object,
    subset: object,
    columns: Columns,
    fields: Iterable[str] = (),
) -> Record:
    """Return the record of a document with these field values, checked.

    Args:
        text: str or UTF-8 bytes. Anything else is a problem.
        fields: the names of all fields, for users who named a wrong field.
    """
    if columns.lists and isinstance(text, list):
        text = json.dumps(text, ensure_ascii=False)
    if not isinstance(text, str | bytes):
        detail = _wrong_field(columns.text, text, "string")
        if text is None and fields:
            detail += f" (its fields: {', '.join(fields)[:FIELDS_SHOWN]})"
        return Record(position, None, "no_text_field", detail)
    try:
        size = len(text) if isinstance(text, bytes) or text.isascii() else len(text.encode())
        if size > columns.max_document_bytes:
            return _too_long(position, size, columns)
        text = text if isinstance(text, str) else text.decode()
        subset = subset.decode() if isinstance(subset, bytes) else subset
    except UnicodeError as error:
        return Record(position, None, "not_utf8", f"it is not UTF-8 ({error})")
    if not text:
        return Record(position, None, "empty", "its text is empty")
    if columns.subset is not None and not (isinstance(subset, str) and subset):
        detail = _wrong_field(columns.subset, subset, "name")
        return Record(position, None, "no_subset_field", detail)
    return Record(position, text, subset=subset if isinstance(subset, str) else None, size=size)


def _wrong_field(field: str, value: object, expected: str) -> str:
    shown = "missing or null" if value is None else f"{value!r:.40}"
    return f'the field "{field}" is {shown} and not a {expected}'


def _too_long(position: Position, size: int, columns: Columns) -> Record:
    """Return the record of a document with `size` bytes."""
    detail = f"it has {size:,} bytes, more than --max_document_bytes {columns.max_document_bytes}"
    return Record(position, None, "too_long", detail)


def foreign_format(content: bytes) -> str | None:
    """Return the foreign format of a content, and its remedy, by the first bytes. None for text."""
    for pattern, description in FOREIGN:
        if re.match(pattern, content[:PEEKED_BYTES]):
            return description
    return None


def foreign_file(name: str, path: Path) -> str | None:
    """Return the foreign format of a file, decompressed by its name. None for any other file."""
    with open(path, "rb") as file:
        content = file.read(PEEKED_BYTES)
    is_compressed = Path(name).suffix.lower() in FRAMES
    if is_compressed and not content.startswith(b"version "):
        try:
            content = next(read_bytes(name, path), b"")
        except BrokenFileError:
            return None  # its reader reports that
    return foreign_format(content)


def read_bytes(name: str, path: Path) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file. After a damage, raise BrokenFileError."""
    new_frame = FRAMES.get(Path(name).suffix.lower())
    size = path.stat().st_size
    if new_frame is None:
        return read_range(path, 0, size)
    return _decompress(read_range(path, 0, size, COMPRESSED_BUFFER_BYTES), size, new_frame)


def read_range(path: Path, start: int, stop: int, buffer_bytes: int = MB) -> Iterator[bytes]:
    """Yield the bytes [start, stop) of a file, at most `buffer_bytes` at once."""
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < stop and (buffer := file.read(min(buffer_bytes, stop - start))):
            start += len(buffer)
            yield buffer


def _decompress(
    buffers: Iterator[bytes], size: int, new_frame: Callable[[], Any]
) -> Iterator[bytes]:
    """Yield the content of compressed frames that follow each other, `size` bytes in all."""
    frame: Any = None
    position = 0
    is_first = True
    for buffer in buffers:
        position += len(buffer)
        while buffer:
            if frame is None:
                if not is_first:
                    buffer = buffer.lstrip(b"\0")  # tapes and block devices fill up with zeros
                    if not buffer:
                        break
                frame = new_frame()
                is_first = False
            try:
                text = frame.decompress(buffer)
            except (zstandard.ZstdError, zlib.error) as error:
                damage = f"the compressed data is damaged before byte {position:,} ({error})"
                raise BrokenFileError("damaged", f"{damage}, all that follows is lost") from error
            if text:
                yield text
            buffer = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None or size == 0:
        cut = "ends in the middle of its compressed data" if size else "is empty"
        detail = f"the file {cut} (byte {size:,}), all that follows is lost"
        raise BrokenFileError("truncated", detail)
