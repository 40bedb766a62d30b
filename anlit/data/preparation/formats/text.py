"""Plain text, one document a file, and JSON lines, of which every line is an object with a text, or blank."""

import codecs
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from anlit.data.preparation.formats import base
from anlit.data.preparation.formats.base import Columns, Place, Record


def read_plain(name: str, path: Path, columns: Columns) -> Iterator[Record]:
    """The one record of a plain text, without a byte-order mark; of a compressed one, no more is decompressed than a
    document may have."""
    text = bytearray()
    try:
        for piece in base.read_bytes(name, path):
            text += piece
            if len(text) > columns.max_document_bytes:
                yield base.too_long(base.THE_FILE, max(len(text), path.stat().st_size), columns)
                return
        yield base.record_of(
            base.THE_FILE, bytes(text.removeprefix(codecs.BOM_UTF8)), None, columns
        )
    except base.BrokenFileError as error:
        yield Record(base.THE_FILE, None, *error.args)


def read_lines(name: str, path: Path, columns: Columns, part: int, parts: int) -> Iterator[Record]:
    """Records of one part, see `read_file`: of the lines that begin in it, from byte size·part/parts on."""
    pieces, start = base.read_bytes(name, path), 0
    if parts > 1:
        size = path.stat().st_size
        start, stop = (_next_line(path, size * number // parts) for number in (part, part + 1))
        pieces = base.read_range(path, start, stop)
    # Counted only if a record has to tell its line: that reads all of the file before this part.
    earlier = (
        cache(lambda: sum(piece.count(b"\n") for piece in base.read_range(path, 0, start)))
        if part
        else None
    )
    # Six bytes of JSON can stand for one of text (\u0041), and other fields need room too. Longer lines are not kept.
    longest = 8 * columns.max_document_bytes + base.MB
    number = 1
    try:
        for line in _lines(pieces, longest):
            place = ("line", number, earlier)
            if isinstance(line, int):
                yield base.too_long(place, line, columns)
            elif line.strip():
                yield _parse(
                    line.removeprefix(codecs.BOM_UTF8) if part == 0 and number == 1 else line,
                    place,
                    columns,
                )
            number += 1
    except base.BrokenFileError as error:
        yield Record(("line", number, earlier), None, *error.args)


def _next_line(path: Path, position: int) -> int:
    """Where the first line begins that does not begin before `position`."""
    if position == 0:
        return 0
    with open(path, "rb") as file:
        file.seek(position - 1)  # a line may begin right at it
        while (line := file.readline(base.MB)) and not line.endswith(b"\n"):
            pass
        return file.tell()


def _lines(pieces: Iterator[bytes], longest: int) -> Iterator[bytes | int]:
    """Lines without their "\\n"; the size of one above `longest`. If `pieces` raises, the line begun is dropped."""
    begun: list[bytes] = []
    size = 0
    for piece in pieces:
        head, *others = piece.split(b"\n")
        begun.append(head)
        size += len(head)
        if size > longest:
            begun.clear()
        if others:
            yield b"".join(begun) if size <= longest else size
            *complete, tail = others
            yield from complete
            begun, size = [tail], len(tail)
    if size:
        yield b"".join(begun) if size <= longest else size


def _parse(line: bytes, place: Place, columns: Columns) -> Record:
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Record(place, None, "not_utf8", f"it is not UTF-8 ({error})")
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        return Record(
            place, None, "not_json", f"the line is not JSON ({error}), each has to be one object"
        )
    if not isinstance(values, dict):
        return Record(place, None, "not_json", "the line is not a JSON object, each has to be one")
    return base.record_of(
        place, _field(values, columns.text), _field(values, columns.subset), columns, values
    )


def _field(values: Any, dotted: str | None) -> Any:
    """The value of a field, whose name may have dots; otherwise dots lead into nested fields."""
    if dotted in values:
        return values[dotted]
    for name in dotted.split(".") if dotted else ():
        values = values.get(name) if isinstance(values, dict) else None
    return values
