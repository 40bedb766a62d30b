"""A prepared folder as a reader sees it: its manifest, its token arrays and the chunks they lie in.

    DIR/manifest.json                 what the folder holds, and the command that makes it
    DIR/tokenizer.json                absent where the tokens came without one
    DIR/<split>/[<subset>/]index.json and chunk-*.bin       litdata's format

Paths are local or an address that litdata fetches from (s3://, gs://, hf://).
"""

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from anlit.data.remote import fetch_bytes, is_remote
from anlit.errors import UserError

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
INDEX = "index.json"
WORK = ".work"  # of an unfinished preparation
CHUNK_HEADER_BYTES = 12
CHECKED_AT_ONCE = 1 << 20  # bytes
REQUIRED = (
    "format_version",
    "corpus",
    "command",
    "splits",
    "train",
    "val",
    "vocab_size",
    "dtype",
    "end_of_document",
    "document_token_at",
    "tokenizer_sha256",
    "content_sha256",
)


class Chunk(NamedTuple):
    """One file of a source: a header of 12 bytes, then tokens."""

    filename: str
    size: int
    """Bytes, with the header."""
    tokens: int
    crc32: int
    """`zlib.crc32` of the whole file."""


@dataclass(frozen=True)
class Source:
    """A split, or a subset of one: one long array of tokens, chunk after chunk."""

    name: str
    """The subset; empty where the split has none."""
    folder: str
    """Path or address of its chunks."""
    chunks: tuple[Chunk, ...]
    dtype: str
    """uint16 or int32, little-endian."""
    content: str
    """Hash of all that the prepared folder holds."""
    command: str
    """What prepares it."""

    @property
    def n_tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)

    def damaged(self, chunk: Chunk, how: str) -> UserError:
        """The error for a chunk that is not what the index says."""
        return _damaged(f"{self.folder}/{chunk.filename}", how, self.command)


def read_bytes(path: str) -> bytes:
    """A small file of a prepared folder, local or remote.

    Raises:
        FileNotFoundError: there is none.
        UserError: the place cannot be reached.
    """
    return fetch_bytes(path) if is_remote(path) else Path(path).read_bytes()


def read_manifest(path: str) -> dict[str, Any]:
    """Manifest of the prepared folder `path`.

    Raises:
        UserError: no folder, not a prepared one, a damaged manifest or one of another format.
    """
    if not is_remote(path) and not Path(path).is_dir():
        raise UserError(
            f"There is no folder {path} with token shards: set --data.path to a prepared folder, "
            "or choose a corpus that prepares one (--data PythonSources)."
        )
    try:
        manifest = json.loads(read_bytes(f"{path}/{MANIFEST}"))
    except FileNotFoundError as error:
        raise UserError(_without_manifest(path)) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _damaged(f"{path}/{MANIFEST}", str(error)) from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise UserError(
            f"{path} has shards of format {version} and this version reads {FORMAT_VERSION}: "
            "remove the folder and prepare it again."
        )
    missing = [key for key in REQUIRED if key not in manifest] if isinstance(manifest, dict) else list(REQUIRED)
    if missing:
        raise _damaged(f"{path}/{MANIFEST}", f"without {', '.join(missing)}")
    return manifest


def _without_manifest(path: str) -> str:
    if is_remote(path):
        return f"There is no {path}/{MANIFEST}: set --data.path to the address of a prepared folder."
    if Path(path, WORK).is_dir():
        return f"The preparation of {path} is not finished: repeat the command that began it, which goes on there."
    return (
        f"{path} is not a prepared folder, it has no {MANIFEST}: set --data.path to one that is, "
        "or to a new name if a corpus is to be prepared there."
    )


def sources_of(path: str, manifest: dict[str, Any], split: str) -> list[Source]:
    """The token arrays of a split: one for each subset in the manifest's order, or the only one.

    Raises:
        UserError: an index is missing, damaged or does not agree with the manifest.
    """
    counts = manifest[split].get("subsets") or {"": manifest[split]}
    sources = []
    for name, count in counts.items():
        folder = "/".join(part for part in (path, split, name) if part)
        chunks = _read_index(folder, manifest["command"])
        source = Source(name, folder, chunks, manifest["dtype"], manifest["content_sha256"], manifest["command"])
        if source.n_tokens != count["tokens"]:
            how = f"{source.n_tokens:,} tokens where the manifest has {count['tokens']:,}"
            raise _damaged(folder, how, manifest["command"])
        sources.append(source)
    return sources


def _read_index(folder: str, command: str) -> tuple[Chunk, ...]:
    index = f"{folder}/{INDEX}"
    try:
        return tuple(
            Chunk(chunk["filename"], chunk["chunk_bytes"], chunk["dim"], chunk["crc32"])
            for chunk in json.loads(read_bytes(index))["chunks"]
        )
    except FileNotFoundError as error:
        raise _damaged(index, "it is missing", command) from error
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise _damaged(index, str(error), command) from error


def check_sizes(source: Source) -> None:
    """Compare the sizes of a local source's chunks with the index; what they hold is checked when they are opened.

    Raises:
        UserError: a chunk is missing or has another length.
    """
    if is_remote(source.folder):
        return
    for chunk in source.chunks:
        file = Path(source.folder, chunk.filename)
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            raise source.damaged(chunk, "it is missing")
        if size != chunk.size:
            raise source.damaged(chunk, f"it has {size:,} bytes instead of {chunk.size:,}")


def problem_with(descriptor: int, chunk: Chunk) -> str | None:
    """What is wrong with an open file that should be `chunk`, or None: reads all of it, at about 3.5 GB/s."""
    size = os.fstat(descriptor).st_size
    if size != chunk.size:
        return f"it has {size:,} bytes instead of {chunk.size:,}"
    crc32, position = 0, 0
    while piece := os.pread(descriptor, CHECKED_AT_ONCE, position):
        crc32 = zlib.crc32(piece, crc32)
        position += len(piece)
    return None if crc32 == chunk.crc32 else f"its CRC-32 is {crc32:08x} instead of {chunk.crc32:08x}"


def _damaged(what: str, how: str, command: str | None = None) -> UserError:
    remake = f"with `{command}`" if command else "by preparing it again"
    return UserError(f"{what} is damaged ({how}): copy the folder again, or remove it and remake it {remake}.")


def chunks_of(path: str, split: str) -> list[dict[str, Any]]:
    """litdata's record of each chunk of a split without subsets: `filename`, `chunk_bytes`, `dim` (tokens)."""
    return json.loads(read_bytes(f"{path}/{split}/{INDEX}"))["chunks"]
