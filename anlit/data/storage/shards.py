"""Reads the token arrays of a prepared folder, in litdata's format.

A split or subset is DIR/<split>/[<subset>/] with index.json and chunk-*.bin.
"""

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from anlit.data.storage.manifest import MANIFEST, checked_path, damage_error, read_complete_json
from anlit.data.storage.remote import is_remote
from anlit.errors import UserError

INDEX = "index.json"
INDEX_SCHEMA = {"chunks": [{"filename": str, "dim": int, "crc32": int}]}
CHUNK_HEADER_BYTES = 12
CHECKSUM_READ_BYTES = 1 << 20


class Chunk(NamedTuple):
    """One file of a token array: a header of 12 bytes, then tokens."""

    filename: str
    size: int  # bytes, with the header
    tokens: int
    crc32: int  # `zlib.crc32` of the whole file


@dataclass(frozen=True)
class TokenArray:
    """A split, or a subset of a split: a long array of tokens, chunk after chunk."""

    name: str  # of the subset; empty for a split without subsets
    folder: str  # path or address of its chunks
    chunks: tuple[Chunk, ...]
    manifest: Mapping[str, Any]

    @property
    def chunk_tokens(self) -> list[int]:
        """The number of tokens in each chunk."""
        return [chunk.tokens for chunk in self.chunks]

    @property
    def n_tokens(self) -> int:
        return sum(self.chunk_tokens)

    def damage_error(self, chunk: Chunk, problem: str) -> UserError:
        """Return the error for a chunk that differs from the index."""
        return damage_error(f"{self.folder}/{chunk.filename}", problem)


def chunk_bytes(tokens: int, dtype: np.dtype) -> int:
    """Return the size of a chunk's file."""
    return CHUNK_HEADER_BYTES + tokens * dtype.itemsize


def read_token_arrays(path: str, manifest: dict[str, Any]) -> dict[str, list[TokenArray]]:
    """Return the token arrays of each split: an array for each subset, or a single array.

    Raises UserError for an index that is damaged, or does not belong to the manifest.
    """
    arrays_by_split = {}
    streams = {}
    for split in manifest["splits"]:
        arrays_by_split[split] = _read_split(path, manifest, split)
        for array in arrays_by_split[split]:
            streams[_join(split, array.name)] = array.chunks
    dtype = np.dtype(manifest["dtype"])
    content = content_sha256(
        streams, manifest["end_of_document"], dtype, manifest["document_token_at"]
    )
    if content != manifest["content_sha256"]:
        problem = f"{MANIFEST} and the chunks that each {INDEX} lists do not belong together"
        raise damage_error(path, problem)
    return arrays_by_split


def content_sha256(
    streams: Mapping[str, Sequence[Chunk]], end_of_document: int, dtype: np.dtype, token_at: str
) -> str:
    """Return a hash of the tokens of a folder and of the way to read them.

    `streams` has the chunks of each token array in order, by names such as "train/web".
    """
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


def _join(*components: str) -> str:
    """Return a path or address without its empty components."""
    return "/".join(filter(None, components))


def _read_split(path: str, manifest: dict[str, Any], split: str) -> list[TokenArray]:
    counts_by_subset = manifest[split].get("subsets") or {"": manifest[split]}
    arrays = []
    for name, counts in counts_by_subset.items():
        folder = _join(path, split, name)
        array = TokenArray(name, folder, tuple(_read_index(folder, manifest)), manifest)
        if array.n_tokens != counts["tokens"]:
            problem = f"{array.n_tokens:,} tokens where the manifest has {counts['tokens']:,}"
            raise damage_error(folder, problem)
        arrays.append(array)
    return arrays


def _read_index(folder: str, manifest: dict[str, Any]) -> list[Chunk]:
    """Return the chunks that a folder's index.json lists."""
    index_path = f"{folder}/{INDEX}"
    dtype = np.dtype(manifest["dtype"])
    try:
        rows = read_complete_json(index_path, INDEX_SCHEMA)["chunks"]
    except FileNotFoundError as error:
        raise damage_error(index_path, "it is missing") from error
    chunks = []
    for row in rows:
        filename = checked_path(row["filename"], index_path, max_depth=1)
        n_tokens = row["dim"]
        chunks.append(Chunk(filename, chunk_bytes(n_tokens, dtype), n_tokens, row["crc32"]))
    return chunks


def check_chunks(array: TokenArray, checksums: bool = False) -> None:
    """Check the length of each chunk of a local token array, and with `checksums` its content.

    Raises UserError for the first chunk that is missing or differs.
    """
    if is_remote(array.folder):
        return
    bad_chunk = find_bad_chunk(array.folder, array.chunks, checksums)
    if bad_chunk is not None:
        raise array.damage_error(*bad_chunk)


def find_bad_chunk(
    folder: str, chunks: Iterable[Chunk], checksums: bool
) -> tuple[Chunk, str] | None:
    """Return the first chunk that is missing or differs from its file, with the problem."""
    for chunk in chunks:
        problem = _find_file_problem(f"{folder}/{chunk.filename}", chunk, checksums)
        if problem is not None:
            return chunk, problem
    return None


def _find_file_problem(path: str, chunk: Chunk, checksum: bool) -> str | None:
    # A file server answers one request per chunk here. Opening it would take several.
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return "it is missing"
    if not stat.S_ISREG(status.st_mode):
        return "it is missing"
    if not checksum:
        return _find_size_problem(status, chunk)
    with open(path, "rb") as file:
        return find_chunk_problem(file.fileno(), chunk)


def _find_size_problem(status: os.stat_result, chunk: Chunk) -> str | None:
    if status.st_size != chunk.size:
        return f"it has {status.st_size:,} bytes instead of {chunk.size:,}"
    return None


def find_chunk_problem(descriptor: int, chunk: Chunk) -> str | None:
    """Compare an open file with its chunk: return the difference, or None.

    The checksum is computed at about 3.5 GB/s.
    """
    problem = _find_size_problem(os.fstat(descriptor), chunk)
    if problem is not None:
        return problem
    crc32 = 0
    position = 0
    while piece := os.pread(descriptor, CHECKSUM_READ_BYTES, position):
        crc32 = zlib.crc32(piece, crc32)
        position += len(piece)
    if crc32 != chunk.crc32:
        return f"its CRC-32 is {crc32:08x} instead of {chunk.crc32:08x}"
    return None
