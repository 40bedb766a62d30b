"""Writes the tokens of a task as chunks, a file per `chunk_bytes` of a stream."""

import zlib
from collections import defaultdict
from typing import Any

import numpy as np

from anlit.data.preparation.tasks import COUNT_KEYS, Job, chunk_name
from anlit.data.round_trip import Change
from anlit.data.storage.shards import CHUNK_HEADER_BYTES
from anlit.io.write import replacing


def _empty_stream() -> dict[str, Any]:
    return {**dict.fromkeys(COUNT_KEYS, 0), "chunks": [], "changes": {}}


class ChunkWriter:
    """The chunks of a task, written to their final paths.

    Attributes:
        streams: counts, changes and chunks of each stream, as in the task's record.
    """

    def __init__(self, job: Job, task: int) -> None:
        self.job = job
        self.task = task
        self.streams: dict[str, dict[str, Any]] = defaultdict(_empty_stream)
        self._unwritten: dict[str, bytearray] = defaultdict(bytearray)

    def add(
        self,
        stream: str,
        tokens: np.ndarray,
        n_bytes: int,
        n_documents: int = 1,
        change: Change | None = None,
    ) -> None:
        """Add documents of `n_bytes` of text; `change` is how their tokens change the text."""
        counts = self.streams[stream]
        if change is not None:
            changes = counts["changes"]
            changes[change.kind] = changes.get(change.kind, 0) + n_documents
        counts["documents"] += n_documents
        counts["bytes"] += n_bytes
        counts["tokens"] += len(tokens)
        unwritten = self._unwritten[stream]
        unwritten += tokens.tobytes()
        full = self.job.recipe.chunk_bytes // tokens.itemsize * tokens.itemsize
        while len(unwritten) >= full:
            self._write(stream, bytes(unwritten[:full]))
            del unwritten[:full]

    def finish(self) -> dict[str, dict[str, Any]]:
        """Write the remaining tokens; return `streams`, without the empty ones."""
        for stream, unwritten in self._unwritten.items():
            if unwritten:
                self._write(stream, bytes(unwritten))
        return {name: counts for name, counts in self.streams.items() if counts["chunks"]}

    def _write(self, stream: str, tokens: bytes) -> None:
        """Write a chunk in litdata's format: one item, after its number, start and end."""
        header = np.array([1, CHUNK_HEADER_BYTES, CHUNK_HEADER_BYTES + len(tokens)], "<u4")
        content = header.tobytes() + tokens
        chunks = self.streams[stream]["chunks"]
        path = self.job.folder / stream / chunk_name(self.task, len(chunks))
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(content)
        chunks.append((len(tokens) // self.job.dtype.itemsize, zlib.crc32(content)))
