"""Random access to a source, all of whose chunks are one array of tokens; chunks of remote sources are cached.

Processes and runs share the cache's folder. A chunk appears in it complete, and one that is removed while it is in use
stays readable for the processes that have it open.
"""

import contextlib
import errno
import hashlib
import os
import resource
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from anlit.data.storage import remote
from anlit.data.storage.manifest import damaged
from anlit.data.storage.shards import CHUNK_HEADER_BYTES, Chunk, Source, problem_with
from anlit.errors import UserError

OPEN_FILES = 256  # of all sources that are read together
SHARE_OF_LIMIT = 8  # they take at most an eighth of the files that the process may open


def cache_root() -> Path:
    """anlit's part of litdata's cache: under LITDATA_CACHE_DIR, or ~/.lightning/chunks."""
    from litdata.utilities.dataset_utilities import get_default_cache_dir

    return Path(get_default_cache_dir(), "anlit")


class ChunkCache:
    """The local copies of a source's chunks, in a folder named by their address and what they hold.

    Above `limit_bytes` in all, of all sources and runs, the least recently used chunks are removed.
    """

    def __init__(self, source: Source, limit_bytes: int) -> None:
        self.source, self.limit_bytes = source, limit_bytes
        self.root = cache_root()
        address = hashlib.sha256(source.folder.encode()).hexdigest()[:16]
        self.folder = self.root / address / source.manifest["content_sha256"][:16]

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
        """Fetch the chunk, unless the cache has it or (without `wait`) another is fetching it; UserError on failure."""
        if self.has(chunk):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{self.path(chunk)}.lock")
        with contextlib.suppress(Timeout), lock.acquire(blocking=wait, poll_interval=0.05):
            if not self.has(chunk):
                self._make_room(chunk.size)
                partial = (
                    self.folder / f"{chunk.filename}.partial"
                )  # only the holder of the chunk's lock writes it
                partial.unlink(missing_ok=True)
                try:
                    remote.fetch(f"{self.source.folder}/{chunk.filename}", partial, chunk.size)
                except FileNotFoundError as error:
                    raise self.source.damaged(chunk, "it is missing") from error
                os.replace(partial, self.path(chunk))

    def _make_room(self, size: int) -> None:
        """Remove the least recently used chunks until `size` more bytes fit."""
        files = []
        for path in self.root.glob("*/*/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        excess = sum(size for _, size, _ in files) + size - self.limit_bytes
        for _, freed, path in sorted(files):
            if excess > 0 and path.suffix not in (".lock", ".partial"):
                path.unlink(missing_ok=True)
                excess -= freed


class OpenFiles:
    """The open chunks of all sources that are read together; the least recently used are closed.

    Pickled, it is empty. A forked process has the descriptors too, and closing its own leaves the others.
    """

    def __init__(self) -> None:
        self._descriptors: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._descriptors)

    def __del__(self) -> None:
        self.close_all_but(0)

    def __getstate__(self) -> dict[str, Any]:
        return {"_descriptors": OrderedDict()}

    def get(self, path: str) -> int | None:
        """The descriptor of a file that is open; it now counts as used."""
        if path in self._descriptors:
            self._descriptors.move_to_end(path)
        return self._descriptors.get(path)

    def open(self, path: str) -> int:
        """Open a file for reading, without keeping it. OSError, or UserError if no more files may be open."""
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = OPEN_FILES
        if soft_limit != resource.RLIM_INFINITY:
            most = min(most, max(1, soft_limit // SHARE_OF_LIMIT))
        self.close_all_but(most - 1)
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        self.close_all_but(0)
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            limits = {
                errno.EMFILE: f"this process may have {soft_limit:,} open (`ulimit -n`)",
                errno.ENFILE: "the machine has as many open as it may (fs.file-max)",
            }
            if error.errno not in limits:
                raise
            raise UserError(
                f"{path} cannot be opened, too many files are open: {limits[error.errno]}: raise "
                "that limit and start again."
            ) from error

    def keep(self, path: str, descriptor: int) -> None:
        """Keep an open file until others are used more recently."""
        self._descriptors[path] = descriptor

    def close_all_but(self, count: int) -> None:
        """Close the least recently used files, so that at most `count` stay open."""
        while len(self._descriptors) > count:
            os.close(self._descriptors.popitem(last=False)[1])


class TokenStore:
    """Random access to the tokens of a source; `cache_bytes` is the size of the cache of all remote ones.

    Stores that are read together share `open_files`, which bounds the chunks that are open at once.
    Files are read with pread, never mapped, so that a process's memory does not grow with what it has
    read. The CRC-32 of each chunk is checked the first time that a process opens it. It can be pickled,
    and used after a fork. Reading raises UserError for a chunk that is missing or damaged, or has tokens
    beyond the vocabulary.
    """

    def __init__(
        self, source: Source, cache_bytes: int = 0, open_files: OpenFiles | None = None
    ) -> None:
        self.source = source
        self.open_files = OpenFiles() if open_files is None else open_files
        self.cache = ChunkCache(source, cache_bytes) if remote.is_remote(source.folder) else None
        self.dtype = np.dtype(source.manifest["dtype"]).newbyteorder("<")
        self.n_tokens = source.n_tokens
        self._ends = np.cumsum([chunk.tokens for chunk in source.chunks])
        self._checked: set[int] = set()

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count), which have to exist."""
        out = np.empty(count, dtype=self.dtype)
        self._read_into(start, out)
        self._check(out)
        return out

    def read_blocks(self, blocks: np.ndarray, length: int) -> np.ndarray:
        """Blocks of `length` + 1 tokens, (n, length + 1): row i is [blocks[i]·length, blocks[i]·length + length]."""
        out = np.empty((len(blocks), length + 1), dtype=self.dtype)
        for row, block in zip(out, blocks.tolist(), strict=True):
            self._read_into(block * length, row)
        self._check(out)
        return out

    def chunks_of(self, tokens: Any) -> np.ndarray:
        """The number of the chunk that each of these tokens lies in; the token after the last has the last's + 1."""
        return self._ends.searchsorted(tokens, side="right")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_checked": set()}

    def _read_into(self, start: int, out: np.ndarray) -> None:
        assert 0 <= start <= start + len(out) <= self.n_tokens, (start, len(out), self.n_tokens)
        number = int(self.chunks_of(start))
        while len(out):
            chunk = self.source.chunks[number]
            before = start - (int(self._ends[number]) - chunk.tokens)
            part = out[: chunk.tokens - before]
            position = CHUNK_HEADER_BYTES + before * self.dtype.itemsize
            try:
                n_bytes = os.preadv(self._descriptor(number), [part.view(np.uint8).data], position)
            except OSError as error:
                raise self.source.damaged(chunk, f"it cannot be read: {error.strerror}") from error
            if n_bytes != part.nbytes:
                raise self.source.damaged(
                    chunk, f"it ends {part.nbytes - n_bytes:,} bytes too soon"
                )
            start, out, number = start + len(part), out[len(part) :], number + 1

    def _check(self, tokens: np.ndarray) -> None:
        """Refuse tokens beyond the vocabulary: on a GPU they fail with an assertion that names nothing."""
        largest = int(
            tokens.view(f"u{tokens.itemsize}").max(initial=0)
        )  # a negative one becomes a large one
        if largest >= (size := self.source.manifest["vocab_size"]):
            how = (
                f"it has token {largest:,}, and its manifest says that the vocabulary has {size:,}"
            )
            raise damaged(self.source.folder, how, self.source.manifest["command"])

    def _descriptor(self, number: int) -> int:
        chunk = self.source.chunks[number]
        folder = self.source.folder if self.cache is None else self.cache.folder
        path = f"{folder}/{chunk.filename}"
        descriptor = self.open_files.get(path)
        if descriptor is None:
            descriptor = self._opened(number, path)
            self.open_files.keep(path, descriptor)
        return descriptor

    def _opened(self, number: int, path: str) -> int:
        """Open a chunk's file and, the first time, check all of it; a bad copy in the cache is fetched again once."""
        chunk = self.source.chunks[number]
        attempts = 1 if self.cache is None else 2
        problem = "it is missing"
        while attempts:
            if self.cache is not None:
                self.cache.fetch(chunk)
            try:
                descriptor = self.open_files.open(path)
            except FileNotFoundError:
                if self.cache is None:
                    break
                continue  # another process has just removed it to make room
            except PermissionError as error:
                raise UserError(f"{path} may not be read: change its permissions.") from error
            if number in self._checked or not (problem := problem_with(descriptor, chunk) or ""):
                self._checked.add(number)
                return descriptor
            os.close(descriptor)
            attempts -= 1
            if self.cache is not None:
                self.cache.path(chunk).unlink(missing_ok=True)
        raise self.source.damaged(chunk, problem)
