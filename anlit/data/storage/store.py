"""Random access to the tokens of a token array. The chunks of remote arrays are cached.

Processes and runs share the cache's folder. A chunk appears in it complete. A chunk that is removed
while it is in use stays readable for the processes that have it open.
"""

import contextlib
import errno
import hashlib
import os
import resource
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from anlit.data.storage import remote
from anlit.data.storage.manifest import damage_error
from anlit.data.storage.shards import (
    CHUNK_HEADER_BYTES,
    Chunk,
    TokenArray,
    find_chunk_problem,
)
from anlit.errors import UserError
from anlit.io.write import write_text

OPEN_FILES = 256
"""The most files that all arrays of a stream keep open."""
LIMIT_DIVISOR = 8
"""They take at most an eighth of the files that the process may open."""
LOCK_POLL_S = 0.05
PARTIAL_SUFFIX = ".partial"
LOCK_SUFFIX = ".lock"
N_LOCKS = 1024
"""Lock files of an array's folder. They stay: removed, a file could be locked twice."""
USAGE = "usage"
"""The file in the cache's folder with the bytes of all chunks, so that no download counts them."""
REMOVED_SHARE = 16
"""Making room removes at least a sixteenth of the chunks, so that it happens seldom."""


def cache_root() -> Path:
    """Return anlit's folder in litdata's cache: LITDATA_CACHE_DIR, or ~/.lightning/chunks."""
    from litdata.utilities.dataset_utilities import get_default_cache_dir

    return Path(get_default_cache_dir(), "anlit")


class ChunkCache:
    """The local copies of an array's chunks, in a folder named by their address and content.

    If the caches of all arrays and runs exceed `limit_bytes`, the least recently used chunks are
    removed.
    """

    def __init__(self, array: TokenArray, limit_bytes: int) -> None:
        self.array = array
        self.limit_bytes = limit_bytes
        self.root = cache_root()
        address = hashlib.sha256(array.folder.encode()).hexdigest()[:16]
        self.folder = self.root / address / array.manifest["content_sha256"][:16]

    def path(self, chunk: Chunk) -> Path:
        return self.folder / chunk.filename

    def has(self, chunk: Chunk) -> bool:
        """Whether the cache holds the chunk, which then counts as used."""
        try:
            os.utime(self.path(chunk))
        except FileNotFoundError:
            return False
        return True

    def fetch(self, chunk: Chunk, wait: bool = True) -> None:
        """Download a chunk that the cache lacks.

        Without `wait`, leave a chunk that another process or thread downloads. Raises UserError if
        the download fails.
        """
        if self.has(chunk):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        lock_number = zlib.crc32(chunk.filename.encode()) % N_LOCKS
        lock = FileLock(self.folder / f"{lock_number}{LOCK_SUFFIX}")
        with contextlib.suppress(Timeout), lock.acquire(blocking=wait, poll_interval=LOCK_POLL_S):
            if not self.has(chunk):
                self._download(chunk)

    def _download(self, chunk: Chunk) -> None:
        """Download a chunk. The caller holds its lock."""
        self._make_room(chunk.size)
        partial = self.folder / f"{chunk.filename}{PARTIAL_SUFFIX}"
        partial.unlink(missing_ok=True)
        try:
            remote.download(f"{self.array.folder}/{chunk.filename}", partial, chunk.size)
        except FileNotFoundError as error:
            raise self.array.damage_error(chunk, "it is missing") from error
        os.replace(partial, self.path(chunk))

    def _make_room(self, size: int) -> None:
        """Remove the least recently used chunks until `size` more bytes fit, and count these."""
        usage = self.root / USAGE
        with FileLock(f"{usage}{LOCK_SUFFIX}", poll_interval=LOCK_POLL_S):
            try:
                used_bytes = int(usage.read_bytes())
            except (FileNotFoundError, ValueError):
                used_bytes = self.limit_bytes  # not counted yet
            if used_bytes + size > self.limit_bytes:
                used_bytes = self._remove_least_used(size)
            write_text(usage, str(used_bytes + size))

    def _remove_least_used(self, size: int) -> int:
        """Remove chunks until `size` more bytes fit; return the bytes of those that stay."""
        chunks = []
        used_bytes = 0
        for folder in filter(Path.is_dir, self.root.glob("*/*")):
            for entry in os.scandir(folder):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    used_bytes += status.st_size
                    if not entry.name.endswith((LOCK_SUFFIX, PARTIAL_SUFFIX)):
                        chunks.append((status.st_mtime, status.st_size, entry.path))
        if used_bytes + size <= self.limit_bytes:
            return used_bytes
        n_at_least = len(chunks) // REMOVED_SHARE
        for number, (_, chunk_size, path) in enumerate(sorted(chunks)):
            if number >= n_at_least and used_bytes + size <= self.limit_bytes:
                break
            Path(path).unlink(missing_ok=True)
            used_bytes -= chunk_size
        return used_bytes


class OpenFiles:
    """The open chunks of all arrays of a stream. The least recently used are closed.

    A pickled copy is empty. A forked process has the descriptors too, and closing its copies leaves
    the parent's open.
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
        """Return the descriptor of an open file, which then counts as used."""
        if path in self._descriptors:
            self._descriptors.move_to_end(path)
        return self._descriptors.get(path)

    def open(self, path: str) -> int:
        """Return a descriptor for reading a file; `keep` stores it.

        Raises FileNotFoundError, or UserError if it cannot be opened.
        """
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        max_open = OPEN_FILES
        if soft_limit != resource.RLIM_INFINITY:
            max_open = min(max_open, max(1, soft_limit // LIMIT_DIVISOR))
        self.close_all_but(max_open - 1)
        try:
            return os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._descriptors:
                self.close_all_but(0)  # they may be the only files that can be closed
                return self.open(path)
            raise UserError(
                f"{path} cannot be opened ({error.strerror}): make it readable, or raise the limit "
                f"of open files (`ulimit -n`, now {soft_limit:,})"
            ) from error

    def keep(self, path: str, descriptor: int) -> None:
        """Store the descriptor of an open file."""
        self._descriptors[path] = descriptor

    def close_all_but(self, count: int) -> None:
        """Close the least recently used files, so that at most `count` stay open."""
        while len(self._descriptors) > count:
            _, descriptor = self._descriptors.popitem(last=False)
            os.close(descriptor)


class TokenStore:
    """Random access to the tokens of an array; `cache_bytes` limits the cache of all remote arrays.

    The stores of a stream share `open_files`, which limits the chunks that are open at once.

    Files are read with pread, never mapped: the memory of a process does not grow while it reads. A
    process checks the CRC-32 of a chunk when it first opens the file. A store can be pickled, and
    used after a fork.

    Reading raises UserError for a chunk that is missing or damaged, or has tokens beyond the
    vocabulary.
    """

    def __init__(
        self, array: TokenArray, cache_bytes: int = 0, open_files: OpenFiles | None = None
    ) -> None:
        self.array = array
        self.open_files = OpenFiles() if open_files is None else open_files
        self.cache = ChunkCache(array, cache_bytes) if remote.is_remote(array.folder) else None
        self.dtype = np.dtype(array.manifest["dtype"]).newbyteorder("<")
        self.n_tokens = array.n_tokens
        self._chunk_ends = np.cumsum(array.chunk_tokens)
        self._checked_chunks: set[int] = set()

    def read(self, start: int, count: int) -> np.ndarray:
        """Return the tokens [start, start + count); all must exist."""
        tokens = np.empty(count, dtype=self.dtype)
        self._read_into(start, tokens)
        self._check_vocabulary(tokens)
        return tokens

    def read_blocks(self, blocks: np.ndarray, length: int) -> np.ndarray:
        """Return (n, length + 1) tokens: row i begins at token blocks[i]·length."""
        tokens = np.empty((len(blocks), length + 1), dtype=self.dtype)
        for row, block in zip(tokens, blocks.tolist(), strict=True):
            self._read_into(block * length, row)
        self._check_vocabulary(tokens)
        return tokens

    def chunk_numbers(self, tokens: Any) -> np.ndarray:
        """Return the number of the chunk that holds each token, by the tokens' positions.

        The position after the last token counts as a further chunk.
        """
        return self._chunk_ends.searchsorted(tokens, side="right")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_checked_chunks": set()}

    def _read_into(self, start: int, out: np.ndarray) -> None:
        """Fill `out` with the tokens from `start` on, from a chunk or several."""
        assert 0 <= start <= start + len(out) <= self.n_tokens, (start, len(out), self.n_tokens)
        number = int(self.chunk_numbers(start))
        while len(out):
            chunk = self.array.chunks[number]
            offset = start - (int(self._chunk_ends[number]) - chunk.tokens)
            segment = out[: chunk.tokens - offset]
            position = CHUNK_HEADER_BYTES + offset * self.dtype.itemsize
            buffers = [segment.view(np.uint8).data]
            try:
                n_bytes = os.preadv(self._descriptor(number), buffers, position)
            except OSError as error:
                problem = f"it cannot be read: {error.strerror}"
                raise self.array.damage_error(chunk, problem) from error
            if n_bytes != segment.nbytes:
                problem = f"it ends {segment.nbytes - n_bytes:,} bytes too soon"
                raise self.array.damage_error(chunk, problem)
            start += len(segment)
            out = out[len(segment) :]
            number += 1

    def _check_vocabulary(self, tokens: np.ndarray) -> None:
        """Raise UserError for tokens beyond the vocabulary.

        A GPU would stop at them with an assertion that names nothing.
        """
        # As unsigned numbers, so that a negative token is a large one.
        largest = int(tokens.view(f"u{tokens.itemsize}").max(initial=0))
        vocab_size = self.array.manifest["vocab_size"]
        if largest >= vocab_size:
            raise damage_error(
                self.array.folder,
                f"it has token {largest:,}, and its manifest says that the vocabulary has "
                f"{vocab_size:,}",
            )

    def _descriptor(self, number: int) -> int:
        """Return the descriptor of a chunk, opened if necessary."""
        folder = self.array.folder if self.cache is None else self.cache.folder
        path = f"{folder}/{self.array.chunks[number].filename}"
        descriptor = self.open_files.get(path)
        if descriptor is None:
            descriptor = self._open(number, path)
            self.open_files.keep(path, descriptor)
        return descriptor

    def _open(self, number: int, path: str) -> int:
        """Open a chunk and check it. A damaged copy in the cache is downloaded again once."""
        chunk = self.array.chunks[number]
        is_last_copy = self.cache is None
        while True:
            if self.cache is not None:
                self.cache.fetch(chunk)
            try:
                descriptor = self.open_files.open(path)
            except FileNotFoundError as error:
                if self.cache is not None:
                    continue  # another process has just removed it to make room
                raise self.array.damage_error(chunk, "it is missing") from error
            problem = self._check_chunk(number, descriptor)
            if problem is None:
                return descriptor
            if self.cache is not None:
                self.cache.path(chunk).unlink(missing_ok=True)
            if is_last_copy:
                raise self.array.damage_error(chunk, problem)
            is_last_copy = True

    def _check_chunk(self, number: int, descriptor: int) -> str | None:
        """Check the content of a chunk when it is opened first.

        Returns the problem and closes the file, or returns None.
        """
        if number in self._checked_chunks:
            return None
        problem = find_chunk_problem(descriptor, self.array.chunks[number])
        if problem is None:
            self._checked_chunks.add(number)
        else:
            os.close(descriptor)
        return problem
