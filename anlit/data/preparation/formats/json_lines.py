"""JSON lines: every line is an object with a text, or blank.

A plain file is cut at bytes size·part/parts; a line belongs to the part in which it begins.
"""

import codecs
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from anlit.data.preparation.formats.base import MB, BrokenFileError, Columns, Place, Record, not_utf8, record_of
from anlit.data.preparation.formats.compressed import read_bytes, read_range


def read(name: str, path: Path, columns: Columns, part: int, parts: int) -> Iterator[Record]:
    """Records of one part, see `read_file`; a compressed file has one."""
    if parts == 1:
        return _records(read_bytes(name, path), None, columns)
    size = path.stat().st_size
    start, stop = (_next_line(path, size * number // parts, size) for number in (part, part + 1))
    # Counted only if a record has to tell its line: that reads all of the file before this part.
    earlier = cache(lambda: sum(piece.count(b"\n") for piece in read_range(path, 0, start)))
    return _records(read_range(path, start, stop), earlier if part else None, columns)


def _next_line(path: Path, position: int, size: int) -> int:
    """Where the first line begins that does not begin before `position`."""
    if position == 0:
        return 0
    position -= 1  # a line may begin right at it
    for piece in read_range(path, position, size):
        if (newline := piece.find(b"\n")) >= 0:
            return position + newline + 1
        position += len(piece)
    return size


def _records(pieces: Iterator[bytes], earlier: Callable[[], int] | None, columns: Columns) -> Iterator[Record]:
    """`earlier` gives the number of lines in the file before these; None: they begin it."""
    # Six bytes of JSON can stand for one of text (\u0041), and other fields need room too. Longer lines are not kept.
    longest = 8 * columns.max_document_bytes + MB
    number = 1
    try:
        for line in _lines(pieces, longest):
            place = ("line", number, earlier)
            if line is None:
                detail = f"the line has more than {longest:,} bytes, too many for --max_document_bytes"
                yield Record(place, None, "too_long", f"{detail} {columns.max_document_bytes}")
            elif line.strip():
                at_start = number == 1 and earlier is None
                yield _parse(line.removeprefix(codecs.BOM_UTF8) if at_start else line, place, columns)
            number += 1
    except BrokenFileError as error:
        yield Record(("line", number, earlier), None, *error.args)


def _lines(pieces: Iterator[bytes], longest: int) -> Iterator[bytes | None]:
    """Lines without their "\\n"; None for one above `longest` bytes. If `pieces` raises, the line begun is dropped."""
    begun: list[bytes] = []
    size = 0
    for piece in pieces:
        head, *others = piece.split(b"\n")
        begun.append(head)
        size += len(head)
        if size > longest:
            begun.clear()
        if others:
            yield b"".join(begun) if size <= longest else None
            *complete, tail = others
            yield from complete
            begun, size = [tail], len(tail)
    if size:
        yield b"".join(begun) if size <= longest else None


def _parse(line: bytes, place: Place, columns: Columns) -> Record:
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Record(place, None, "not_utf8", not_utf8(error))
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        return Record(place, None, "not_json", f"the line is not JSON ({error})")
    if not isinstance(values, dict):
        return Record(place, None, "not_json", "the line is not a JSON object")
    subset = None if columns.subset is None else _field(values, columns.subset)
    return record_of(place, _field(values, columns.text), subset, columns)


def _field(values: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values
