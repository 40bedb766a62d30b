"""JSON lines, plain or compressed: every line is an object with a text, or blank.

Plain files are cut at line starts. Cutting reads the file once to count its lines, so that every record knows its
number; that runs at the speed of the disk, hundreds of times faster than tokenizing, and a file of one span is not
read at all. Compressed files cannot be entered in the middle: they are one span.
"""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard

from anlit.data.preparation.formats.base import (
    MB,
    BrokenFileError,
    Columns,
    Format,
    Record,
    Span,
    bad_record,
    not_utf8,
    record_of,
)

PIECE_BYTES = MB  # read at once from a plain file
COMPRESSED_PIECE_BYTES = MB // 64  # and from a compressed one: repetitive text is thousands of times longer
LARGEST_WINDOW = 1 << 31  # what `zstd --long=31` writes; memory is taken only if a file asks for it


class JsonLines(Format):
    """Plain .jsonl."""

    def spans(self, path: Path, span_bytes: int) -> list[Span]:
        size = path.stat().st_size
        if size <= span_bytes:
            return [Span(0, size, 0)]
        spans: list[Span] = []
        start = first_record = lines = position = 0  # of the span, and of the piece
        for piece in _pieces(path, 0, size):
            counted = 0
            while (newline := piece.find(b"\n", max(counted, start + span_bytes - 1 - position))) >= 0:
                lines += piece.count(b"\n", counted, newline + 1)
                counted = newline + 1
                spans.append(Span(start, position + counted, first_record))
                start, first_record = position + counted, lines
            lines += piece.count(b"\n", counted)
            position += len(piece)
        if start < position:
            spans.append(Span(start, position, first_record))
        return spans

    def read(self, path: Path, span: Span, columns: Columns) -> Iterator[Record]:
        return _records(_pieces(path, span.start, span.stop), span.first_record, columns)


class ZstdJsonLines(Format):
    """.jsonl.zst: one or several compressed frames, one after the other."""

    def spans(self, path: Path, span_bytes: int) -> list[Span]:
        return [Span(0, path.stat().st_size, 0)]

    def read(self, path: Path, span: Span, columns: Columns) -> Iterator[Record]:
        return _records(_decompressed(path), 0, columns)


def _decompressed(path: Path) -> Iterator[bytes]:
    """The text in pieces.

    Raises:
        BrokenFileError: after everything that could be decoded.
    """
    size = path.stat().st_size
    frame: Any = None
    position = 0
    for piece in _pieces(path, 0, size, COMPRESSED_PIECE_BYTES):
        position += len(piece)
        while piece:
            # Not `stream_reader`, which takes a cut file for a whole one.
            frame = frame or zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj()
            try:
                text = frame.decompress(piece)
            except zstandard.ZstdError as error:
                where = f"the compressed data is damaged before byte {position:,}"
                raise BrokenFileError("damaged", f"{where} ({error}), all that follows is lost") from error
            if text:
                yield text
            piece = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None or size == 0:
        cut = "ends in the middle of its compressed data" if size else "is empty"
        raise BrokenFileError("truncated", f"the file {cut} (byte {size:,}), all that follows is lost")


def _pieces(path: Path, start: int, stop: int, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """Bytes [start, stop) of a file."""
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < stop and (piece := file.read(min(piece_bytes, stop - start))):
            start += len(piece)
            yield piece


def _records(pieces: Iterator[bytes], index: int, columns: Columns) -> Iterator[Record]:
    # Six bytes of JSON can stand for one of text (\u0041), and other fields need room too. Longer lines are not kept.
    longest = 8 * columns.max_document_bytes + MB
    try:
        for line in _lines(pieces, longest):
            where = f"line {index + 1}"
            if line is None:
                detail = f"the line has more than {longest:,} bytes, too many for --max_document_bytes"
                yield bad_record(where, "too_long", f"{detail} {columns.max_document_bytes}")
            elif line.strip():
                yield _parse(line.removeprefix(codecs.BOM_UTF8) if index == 0 else line, where, columns)
            index += 1
    except BrokenFileError as error:
        yield bad_record(f"line {index + 1}", error.problem, error.detail)


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


def _parse(line: bytes, where: str, columns: Columns) -> Record:
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return bad_record(where, "not_utf8", not_utf8(error))
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        return bad_record(where, "not_json", f"the line is not JSON ({error})")
    if not isinstance(values, dict):
        return bad_record(where, "not_json", "the line is not a JSON object")
    subset = None if columns.subset is None else _field(values, columns.subset)
    return record_of(where, _field(values, columns.text), subset, columns)


def _field(values: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values
