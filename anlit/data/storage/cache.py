"""A bounded cache of remote chunks on the local disk, which fetches each chunk once per machine.

Processes and runs share its folder. A chunk appears in it complete, a lock keeps a second process from fetching it, and
a chunk that is removed while it is in use stays readable for the processes that have it open.
"""

import contextlib
import hashlib
import os
from pathlib import Path

from filelock import FileLock, Timeout

from anlit.data.storage import remote
from anlit.data.storage.shards import Chunk, Source


def cache_root() -> Path:
    """anlit's part of litdata's cache: under LITDATA_CACHE_DIR, or ~/.lightning/chunks."""
    from litdata.utilities.dataset_utilities import get_default_cache_dir

    return Path(get_default_cache_dir(), "anlit")


class ChunkCache:
    """The local copies of a source's chunks, in a folder named by their address and what they hold.

    Args:
        limit_bytes: size of the whole cache, all sources and runs together. Above it the least recently used chunks
            are removed.
    """

    def __init__(self, source: Source, limit_bytes: int) -> None:
        self.source, self.limit_bytes = source, limit_bytes
        self.root = cache_root()
        self.folder = self.root / hashlib.sha256(source.folder.encode()).hexdigest()[:16] / source.content[:16]

    def path(self, chunk: Chunk) -> Path:
        return self.folder / chunk.filename

    def has(self, chunk: Chunk) -> bool:
        """Whether the chunk is there; if so it now counts as used."""
        try:
            os.utime(self.path(chunk))
        except FileNotFoundError:
            return False
        return True

    def fetch(self, chunk: Chunk, wait: bool = True) -> None:
        """Fetch the chunk, unless the cache has it; its content is checked by who opens it.

        Args:
            wait: whether to wait for another thread or process that is fetching it.

        Raises:
            UserError: it cannot be fetched.
        """
        if self.has(chunk):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{self.path(chunk)}.lock")
        with contextlib.suppress(Timeout), lock.acquire(blocking=wait, poll_interval=0.05):
            if not self.has(chunk):
                self._make_room(chunk.size)
                partial = self.folder / f"{chunk.filename}.partial"  # only the holder of the chunk's lock writes it
                partial.unlink(missing_ok=True)
                try:
                    remote.fetch(f"{self.source.folder}/{chunk.filename}", partial, chunk.size)
                except FileNotFoundError as error:
                    raise self.source.damaged(chunk, "it is missing") from error
                os.replace(partial, self.path(chunk))

    def discard(self, chunk: Chunk) -> None:
        """Remove a copy that has proved damaged."""
        self.path(chunk).unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """Remove the least recently used chunks until `size` more bytes fit."""
        files = []
        for path in self.root.glob("*/*/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        excess = sum(size for _, size, _ in files) + size - self.limit_bytes
        for _, freed, path in sorted(files):
            if excess <= 0:
                return
            if path.suffix not in (".lock", ".partial"):
                path.unlink(missing_ok=True)
                excess -= freed
