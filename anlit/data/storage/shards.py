"""A prepared folder as a reader sees it: its manifest, its token arrays and the chunks they lie in.

    DIR/manifest.json                 what the folder holds, and the command that makes it
    DIR/tokenizer.json                absent where the tokens came without one
    DIR/<split>/[<subset>/]index.json and chunk-*.bin       litdata's format

Paths are local or an address that litdata fetches from (s3://, gs://, hf://).
"""

import hashlib
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from anlit.data.storage.names import checked_name, checked_path, checked_sha256
from anlit.data.storage.remote import fetch_bytes, is_remote
from anlit.errors import UserError

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
INDEX = "index.json"
WORK = ".work"  # of an unfinished preparation
CHUNK_HEADER_BYTES = 12
CHECKED_AT_ONCE = 1 << 20  # bytes
SPLITS = ("train", "val", "test")
DTYPES = ("uint16", "int32")
"""Of tokens, little-endian."""
LARGEST_SMALL_FILE = 200_000_000  # bytes of a manifest, an index (a million chunks) or a tokenizer
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
        UserError: the place cannot be reached, or the file is too large to be one of these.
    """
    if is_remote(path):
        return fetch_bytes(path)
    with Path(path).open("rb") as file:
        content = file.read(LARGEST_SMALL_FILE + 1)
    if len(content) > LARGEST_SMALL_FILE:
        raise _damaged(path, f"it has more than {LARGEST_SMALL_FILE:,} bytes")
    return content


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
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
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
    _check_manifest(manifest, f"{path}/{MANIFEST}")
    return manifest


def _check_manifest(manifest: dict[str, Any], where: str) -> None:
    """Check what becomes a path, a type or a size.

    Raises:
        UserError: a value cannot be what `anlit prepare` writes.
    """
    checked_sha256(manifest["content_sha256"], where)
    if manifest["tokenizer_sha256"] is not None:
        checked_sha256(manifest["tokenizer_sha256"], where)
    size, end = manifest["vocab_size"], manifest["end_of_document"]
    splits = manifest["splits"]
    checks = {
        "splits": isinstance(splits, list) and all(split in SPLITS and split in manifest for split in splits),
        "dtype": manifest["dtype"] in DTYPES,
        "vocab_size": type(size) is int and 0 < size <= 1 << 31,
        "end_of_document": type(size) is type(end) is int and 0 <= end < size,
        "document_token_at": manifest["document_token_at"] in ("end", "start"),
        "command": isinstance(manifest["command"], str),
    }
    for split in splits if checks["splits"] else ():
        parts = (manifest[split].get("subsets") or {}) if isinstance(manifest[split], dict) else {}
        checks[split] = isinstance(parts, dict) and all(map(_is_count, [manifest[split], *parts.values()]))
        for name in parts:
            checked_name(name, where)
    if wrong := [key for key, is_right in checks.items() if not is_right]:
        raise _damaged(where, f"{wrong[0]} is {manifest[wrong[0]]!r:.80}")


def _is_count(part: Any) -> bool:
    return isinstance(part, dict) and all(
        type(part.get(key)) is int and part[key] >= 0 for key in ("documents", "tokens")
    )


def read_tokenizer(path: str, manifest: dict[str, Any]) -> bytes:
    """The content of a prepared folder's tokenizer.json, which is the one that its tokens were made with.

    Raises:
        UserError: there is none, or another one has taken its place.
    """
    try:
        content = read_bytes(f"{path}/{TOKENIZER}")
    except FileNotFoundError as error:
        raise UserError(
            f"{path} has no {TOKENIZER}, so its tokens cannot be turned into text: put the tokenizer's file there "
            "under that name."
        ) from error
    then, now = manifest["tokenizer_sha256"], hashlib.sha256(content).hexdigest()
    if then is not None and then != now:
        raise UserError(
            f"{path}/{TOKENIZER} is not the tokenizer that made the tokens (its SHA-256 begins with {now[:12]}, and "
            f"{MANIFEST} has {then[:12]}): put that one back."
        )
    return content


def check_tokenizer(path: str, manifest: dict[str, Any]) -> None:
    """Compare the tokenizer.json of a local folder, if it has one, with the manifest.

    Raises:
        UserError: it is another one.
    """
    if not is_remote(path) and Path(path, TOKENIZER).is_file():
        read_tokenizer(path, manifest)


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
        return tuple(checked_chunk(chunk, index) for chunk in json.loads(read_bytes(index))["chunks"])
    except FileNotFoundError as error:
        raise _damaged(index, "it is missing", command) from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError) as error:
        raise _damaged(index, str(error), command) from error


def checked_chunk(record: dict[str, Any], where: str) -> Chunk:
    """A chunk as an index.json or a sources.jsonl has it.

    Raises:
        UserError: its name is not that of a file in the same folder.
        KeyError, TypeError: something else is missing or of another type.
    """
    chunk = Chunk(checked_name(record["filename"], where), record["chunk_bytes"], record["dim"], record["crc32"])
    if any(type(number) is not int or number < 0 for number in chunk[1:]):
        raise TypeError(f"{chunk.filename} has a size, a number of tokens or a checksum that is none")
    return chunk


def checked_stream(name: Any, where: str) -> str:
    """Folder of a split or of a subset of one: "val", "train/RedPajamaC4".

    Raises:
        UserError: it is another folder.
    """
    split, *subset = checked_path(name, where).split("/")
    if split not in SPLITS or len(subset) > 1:
        raise _damaged(where, f"{name!r} is not a split")
    return str(name)


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
