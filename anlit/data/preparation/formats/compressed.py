"""Bytes of plain files, of .gz and of .zst: one or several compressed frames, one after the other."""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from anlit.data.preparation.formats.base import MB, BrokenFileError

PIECE_BYTES = MB  # read at once from a plain file
COMPRESSED_PIECE_BYTES = MB // 64  # and from a compressed one: repetitive text is thousands of times longer
LARGEST_WINDOW = 1 << 31  # what `zstd --long=31` writes; memory is taken only if a file asks for it
# Not `stream_reader`, which takes a cut file for a whole one, nor `gzip.open`, which loses what came before the cut.
FRAMES: dict[str, Callable[[], Any]] = {
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj(),
    ".gz": lambda: zlib.decompressobj(wbits=31),
}


def without_compression(name: str) -> str:
    """The name in small letters, without .gz or .zst."""
    name = name.lower()
    return next((name.removesuffix(ending) for ending in FRAMES if name.endswith(ending)), name)


def read_bytes(name: str, path: Path) -> Iterator[bytes]:
    """The decompressed bytes of a file, in pieces; BrokenFileError after everything that could be decoded."""
    new_frame = next((frame for ending, frame in FRAMES.items() if name.lower().endswith(ending)), None)
    size = path.stat().st_size
    if new_frame is None:
        return read_range(path, 0, size)
    return _decompressed(read_range(path, 0, size, COMPRESSED_PIECE_BYTES), size, new_frame)


def read_range(path: Path, start: int, stop: int, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """Bytes [start, stop) of a file as they are, in pieces."""
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < stop and (piece := file.read(min(piece_bytes, stop - start))):
            start += len(piece)
            yield piece


def _decompressed(pieces: Iterator[bytes], size: int, new_frame: Callable[[], Any]) -> Iterator[bytes]:
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
                raise BrokenFileError("damaged", f"{where} ({error}), all that follows is lost") from error
            if text:
                yield text
            piece = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None or size == 0:
        cut = "ends in the middle of its compressed data" if size else "is empty"
        raise BrokenFileError("truncated", f"the file {cut} (byte {size:,}), all that follows is lost")
