"""Assembles a group: the token files of its tasks become litdata chunks in their final place, and a record."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from anlit.data.preparation.encode import Job
from anlit.data.preparation.workspace import read_json
from anlit.data.storage.manifest import TRAIN, VAL
from anlit.data.storage.shards import checked_stream
from anlit.errors import UserError
from anlit.reporting.files import replacing, write_json

HEADER = np.dtype("<u4")
READ_BYTES = 1 << 24


def assemble_group(job: Job, group: int, n_tasks: int, chunk_bytes: int, source_sha256: dict[str, str]) -> None:
    """Write a group's chunks and then its record.

    Args:
        n_tasks: how many tasks the group has; all are encoded.
        source_sha256: of each source file of the group.

    Raises:
        UserError: the first group is smaller than the validation split that is to be cut from it.
        OSError: the disk is full, or fails.
    """
    records = [read_json(job.workspace.task_record(group, task)) for task in range(n_tasks)]
    streams = _streams(job, group, records)
    for name, stream in streams.items():
        source = _token_bytes(job, group, n_tasks, stream.pop("source"), stream.pop("skip"), stream["tokens"])
        folder = job.workspace.target / name
        folder.mkdir(parents=True, exist_ok=True)
        stream["chunks"] = list(_write_chunks(folder, group, source, chunk_bytes, job.dtype.itemsize))
    record = {"group": group, "files": _files(records, source_sha256), "streams": streams}
    write_json(job.workspace.group_record(group), record)


def _streams(job: Job, group: int, records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each stream of the group: what it holds, and from which token of which of the tasks' streams on."""
    streams: dict[str, dict[str, Any]] = {}
    for record in records:
        for name, counts in record["streams"].items():
            checked_stream(name, str(job.workspace.tasks))
            stream = streams.setdefault(name, {"source": name, "skip": 0, "documents": 0, "bytes": 0, "tokens": 0})
            for key, value in counts.items():
                stream[key] += value
    if group == 0 and job.splits.first_tokens:
        documents = [document for record in records for document in record["documents"].get(TRAIN, [])]
        streams[VAL], streams[TRAIN] = _cut(documents, job.splits.first_tokens)
    return dict(sorted(streams.items()))


def _cut(documents: list[list[int]], n_tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The documents up to the one that holds token number `n_tokens`, and those behind it."""
    lengths, sizes = np.array(documents, dtype=np.int64).reshape(-1, 2).T
    held_out = int(np.searchsorted(lengths.cumsum(), n_tokens)) + 1
    if held_out >= len(documents):
        raise UserError(
            f"The first part of the corpus has {int(lengths.sum()):,} tokens, too few to hold out the first "
            f"{n_tokens:,} of them and train on the rest: set --val_tokens to a smaller number."
        )

    def counts(part: slice, skip: int) -> dict[str, Any]:
        n, size = int(lengths[part].sum()), int(sizes[part].sum())
        return {"source": TRAIN, "skip": skip, "documents": len(lengths[part]), "bytes": size, "tokens": n}

    return counts(slice(held_out), 0), counts(slice(held_out, None), int(lengths[:held_out].sum()))


def _token_bytes(job: Job, group: int, n_tasks: int, stream: str, skip: int, n_tokens: int) -> Iterator[bytes]:
    """Tokens [skip, skip + n_tokens) of a stream of the tasks, as bytes in pieces."""
    ahead, left = skip * job.dtype.itemsize, n_tokens * job.dtype.itemsize
    for task in range(n_tasks):
        path = job.workspace.task_tokens(group, task, stream)
        if not left or not path.exists():  # the task had no document of this stream
            continue
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(min(ahead, size))
            ahead -= min(ahead, size)
            while left and (piece := file.read(min(READ_BYTES, left))):
                left -= len(piece)
                yield piece
    if left:
        raise OSError(f"{left:,} bytes of tokens of stream {stream} are missing in {job.workspace.tasks}")


def _write_chunks(
    folder: Path, group: int, pieces: Iterator[bytes], chunk_bytes: int, token_bytes: int
) -> Iterator[dict[str, Any]]:
    """Cut a stream into chunks of `chunk_bytes` of tokens; the last may be shorter."""
    full = chunk_bytes - chunk_bytes % token_bytes
    buffer = bytearray()
    number = 0
    for piece in pieces:
        buffer += piece
        while len(buffer) >= full:
            yield _write_chunk(folder / _chunk_name(group, number), bytes(buffer[:full]), token_bytes)
            del buffer[:full]
            number += 1
    if buffer:
        yield _write_chunk(folder / _chunk_name(group, number), bytes(buffer), token_bytes)


def _chunk_name(group: int, number: int) -> str:
    return f"chunk-{group:06d}-{number:04d}.bin"


def _write_chunk(path: Path, tokens: bytes, token_bytes: int) -> dict[str, Any]:
    """A chunk in litdata's format with one item: number of items, where it begins and ends, the item."""
    start = 3 * HEADER.itemsize
    content = np.array([1, start, start + len(tokens)], dtype=HEADER).tobytes() + tokens
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    return {
        "chunk_bytes": len(content),
        "chunk_size": 1,
        "dim": len(tokens) // token_bytes,
        "filename": path.name,
        "crc32": zlib.crc32(content),
    }


def _files(records: list[dict[str, Any]], source_sha256: dict[str, str]) -> list[dict[str, Any]]:
    """One entry for each source file, its pieces added up."""
    files: dict[str, dict[str, Any]] = {}
    for piece in (piece for record in records for piece in record["files"]):
        name = piece["name"]
        file = files.setdefault(
            name, {"name": name, "sha256": source_sha256[name], "documents": 0, "bytes": 0, "tokens": 0}
        )
        for key in ("documents", "bytes", "tokens"):
            file[key] += piece[key]
        for reason, count in piece.get("skipped", {}).items():
            skipped = file.setdefault("skipped", {})
            skipped[reason] = skipped.get(reason, 0) + count
        if "skipped_list" in piece:
            file.setdefault("skipped_list", []).extend(piece["skipped_list"])
    return list(files.values())
