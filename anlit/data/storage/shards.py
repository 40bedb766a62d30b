"""The token arrays of a prepared folder, and the chunks that they lie in.

DIR/<split>/[<subset>/]index.json and chunk-*.bin       litdata's format
"""

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from anlit.data.storage.manifest import checked_path, damaged, read_json
from anlit.data.storage.remote import is_remote
from anlit.errors import UserError

INDEX = "index.json"
CHUNK_HEADER_BYTES = 12
CHECKED_AT_ONCE = 1 << 20  # bytes


class Chunk(NamedTuple):
    """One file of a source: a header of 12 bytes, then tokens."""

    filename: str
    size: int  # bytes, with the header
    tokens: int
    crc32: int  # `zlib.crc32` of the whole file


@dataclass(frozen=True)
class Source:
    """A split, or a subset of one: one long array of tokens, chunk after chunk."""

    name: str  # the subset; empty where the split has none
    folder: str  # path or address of its chunks
    chunks: tuple[Chunk, ...]
    manifest: Mapping[str, Any]

    @property
    def n_tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)

    def damaged(self, chunk: Chunk, how: str) -> UserError:
        """The error for a chunk that is not what the index says."""
        return damaged(f"{self.folder}/{chunk.filename}", how, self.manifest["command"])


def chunk_bytes(tokens: int, dtype: np.dtype) -> int:
    """Size of a chunk's file."""
    return CHUNK_HEADER_BYTES + tokens * dtype.itemsize


def sources_of(path: str, manifest: dict[str, Any], split: str) -> list[Source]:
    """The token arrays of a split: one for each subset in the manifest's order, or the only one.

    Raises UserError for an index that is missing, damaged or does not agree with the manifest.
    """
    counts = manifest[split].get("subsets") or {"": manifest[split]}
    sources = []
    for name, count in counts.items():
        folder = "/".join(part for part in (path, split, name) if part)
        source = Source(name, folder, _read_index(folder, manifest["command"]), manifest)
        for chunk in source.chunks:
            if chunk.size != (size := chunk_bytes(chunk.tokens, np.dtype(manifest["dtype"]))):
                raise source.damaged(chunk, f"its index says {chunk.size:,} bytes and tokens that take {size:,}")
        if source.n_tokens != count["tokens"]:
            how = f"{source.n_tokens:,} tokens where the manifest has {count['tokens']:,}"
            raise damaged(folder, how, manifest["command"])
        sources.append(source)
    return sources


def _read_index(folder: str, command: str) -> tuple[Chunk, ...]:
    index = f"{folder}/{INDEX}"
    try:
        chunks = tuple(
            Chunk(checked_path(chunk["filename"], index, 1), chunk["chunk_bytes"], chunk["dim"], chunk["crc32"])
            for chunk in read_json(index, command)["chunks"]
        )
    except FileNotFoundError as error:
        raise damaged(index, "it is missing", command) from error
    except (KeyError, TypeError) as error:
        raise damaged(index, str(error), command) from error
    for chunk in chunks:
        if any(type(number) is not int or number < 0 for number in chunk[1:]):
            raise damaged(index, f"a number of {chunk.filename} is none", command)
    return chunks


def check_chunks(source: Source, checksums: bool = False) -> None:
    """Raise UserError for a chunk of a local source that is missing or has another length than in the index.

    Args:
        checksums: compare them, too; otherwise what the chunks hold is checked when they are opened.
    """
    for chunk in () if is_remote(source.folder) else source.chunks:
        file = Path(source.folder, chunk.filename)
        if not file.is_file():
            raise source.damaged(chunk, "it is missing")
        if (size := file.stat().st_size) != chunk.size:
            raise source.damaged(chunk, _wrong_size(size, chunk))
        if checksums:
            with file.open("rb") as opened:
                if problem := problem_with(opened.fileno(), chunk):
                    raise source.damaged(chunk, problem)


def _wrong_size(size: int, chunk: Chunk) -> str:
    return f"it has {size:,} bytes instead of {chunk.size:,}"


def problem_with(descriptor: int, chunk: Chunk) -> str | None:
    """What is wrong with an open file that should be `chunk`, or None: reads all of it, at about 3.5 GB/s."""
    if (size := os.fstat(descriptor).st_size) != chunk.size:
        return _wrong_size(size, chunk)
    crc32, position = 0, 0
    while piece := os.pread(descriptor, CHECKED_AT_ONCE, position):
        crc32 = zlib.crc32(piece, crc32)
        position += len(piece)
    return None if crc32 == chunk.crc32 else f"its CRC-32 is {crc32:08x} instead of {chunk.crc32:08x}"
