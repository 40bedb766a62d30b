"""The token arrays of a prepared folder: DIR/<split>/[<subset>/]index.json and chunk-*.bin, in litdata's format."""

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from anlit.data.storage.manifest import MANIFEST, checked_path, damaged, read_json
from anlit.data.storage.remote import is_remote
from anlit.errors import UserError

INDEX = "index.json"
NUMBERS = ("chunk_bytes", "dim", "crc32")
SCHEMA = {"chunks": [{"filename": str, **dict.fromkeys(NUMBERS, int)}]}
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


def read_sources(path: str, manifest: dict[str, Any]) -> dict[str, list[Source]]:
    """The token arrays of each split: one for each subset, or the only one.

    Raises UserError for an index that is damaged, or is not the one that the manifest was written for.
    """
    sources = {split: _sources_of(path, manifest, split) for split in manifest["splits"]}
    streams = {
        "/".join(part for part in (split, source.name) if part): source.chunks
        for split in sources
        for source in sources[split]
    }
    dtype = np.dtype(manifest["dtype"])
    content = content_sha256(
        streams, manifest["end_of_document"], dtype, manifest["document_token_at"]
    )
    if content != manifest["content_sha256"]:
        how = f"{MANIFEST} and the chunks that each {INDEX} lists do not belong together"
        raise damaged(path, how, manifest["command"])
    return sources


def content_sha256(
    streams: Mapping[str, Sequence[Chunk]], end_of_document: int, dtype: np.dtype, token_at: str
) -> str:
    """What identifies a folder's tokens: the chunks of each stream in their order, and how they are read."""
    chunks_by_stream = {}
    for name, chunks in streams.items():
        chunks_by_stream[name] = [(chunk.tokens, chunk.crc32) for chunk in chunks]
    identity = {
        "streams": chunks_by_stream,
        "end_of_document": end_of_document,
        "dtype": dtype.name,
    }
    if token_at != "end":
        identity["document_token_at"] = token_at
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _sources_of(path: str, manifest: dict[str, Any], split: str) -> list[Source]:
    counts = manifest[split].get("subsets") or {"": manifest[split]}
    sources = []
    for name, count in counts.items():
        folder = "/".join(part for part in (path, split, name) if part)
        where = f"{folder}/{INDEX}"
        try:
            rows = read_json(where, SCHEMA, manifest["command"])["chunks"]
        except FileNotFoundError as error:
            raise damaged(where, "it is missing", manifest["command"]) from error
        if any(row[key] < 0 for row in rows for key in NUMBERS):
            raise damaged(where, "a number is negative", manifest["command"])
        chunks = [
            Chunk(checked_path(row["filename"], where, 1), *(row[key] for key in NUMBERS))
            for row in rows
        ]
        source = Source(name, folder, tuple(chunks), manifest)
        for chunk in source.chunks:
            if chunk.size != (size := chunk_bytes(chunk.tokens, np.dtype(manifest["dtype"]))):
                raise source.damaged(
                    chunk, f"its index says {chunk.size:,} bytes and tokens that take {size:,}"
                )
        if source.n_tokens != count["tokens"]:
            how = f"{source.n_tokens:,} tokens where the manifest has {count['tokens']:,}"
            raise damaged(folder, how, manifest["command"])
        sources.append(source)
    return sources


def check_chunks(source: Source, checksums: bool = False) -> None:
    """Raise UserError for a chunk of a local source that is missing, or has another length (or checksum, if asked)."""
    if lost := lost_chunk(
        source.folder, () if is_remote(source.folder) else source.chunks, checksums
    ):
        raise source.damaged(*lost)


def lost_chunk(folder: str, chunks: Iterable[Chunk], checksums: bool) -> tuple[Chunk, str] | None:
    """The first chunk that is missing, or not as long as it should be, and what is wrong with it."""
    for chunk in chunks:
        problem: str | None = "it is missing"
        if (file := Path(folder, chunk.filename)).is_file():
            with file.open("rb") as opened:
                problem = problem_with(opened.fileno(), chunk, checksums)
        if problem is not None:
            return chunk, problem
    return None


def problem_with(descriptor: int, chunk: Chunk, checksum: bool = True) -> str | None:
    """What is wrong with an open file that should be `chunk`, or None; its checksum is read at about 3.5 GB/s."""
    if (size := os.fstat(descriptor).st_size) != chunk.size:
        return f"it has {size:,} bytes instead of {chunk.size:,}"
    crc32, position = 0, 0
    while checksum and (piece := os.pread(descriptor, CHECKED_AT_ONCE, position)):
        crc32 = zlib.crc32(piece, crc32)
        position += len(piece)
    return (
        f"its CRC-32 is {crc32:08x} instead of {chunk.crc32:08x}"
        if checksum and crc32 != chunk.crc32
        else None
    )
