"""Streams of batches, read from token stores: endless for training, finite for evaluation."""

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from anlit.data.order import MixtureOrder
from anlit.data.storage.shards import Chunk
from anlit.data.storage.store import ChunkCache, TokenStore
from anlit.errors import UserError

DRAWS_AHEAD = 65_536
"""Draws between the download of a remote chunk and its first use."""
LOOKS_PER_WINDOW = 16
"""How often a stream looks for chunks to download while it reads `DRAWS_AHEAD` draws."""
DOWNLOAD_THREADS = 4
DownloadQueue = deque[tuple[ChunkCache, Chunk]]


class TokenBlocks(NamedTuple):
    """A batch as loader workers send it, in its shortest form."""

    tokens: np.ndarray  # (B, T + 1), two or four bytes each
    n_targets: np.ndarray | None  # (B,) how many targets of each row count; None for all


@dataclass(frozen=True)
class Share:
    """The rows of a global batch that this device gets."""

    batch_size: int  # B, sequences per device
    rank: int = 0
    world_size: int = 1

    @property
    def sequences(self) -> int:
        """Sequences of a global batch."""
        return self.batch_size * self.world_size


class BlockStream(IterableDataset):
    """A stream of batches. Worker w of n makes the batches w, w + n and so on.

    torch's DataLoader asks its workers in turn, so the batches do not depend on their number. A
    worker sends a UserError instead of raising it: torch would wrap it into a traceback.
    """

    share: Share
    n_batches: int | None = None  # batches of each device; None for a stream without end
    n_blocks: int  # sequences that all devices together read: all, or an epoch's
    start = 0  # sequences that all devices have drawn before the first batch

    def batch(self, number: int) -> TokenBlocks:
        raise NotImplementedError

    def first_draw(self, number: int) -> int:
        """Return the first sequence of this device in a global batch."""
        return self.start + number * self.share.sequences + self.share.rank * self.share.batch_size

    def __iter__(self) -> Iterator[TokenBlocks | UserError]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        try:
            for number in itertools.islice(itertools.count(), first, self.n_batches, step):
                yield self.batch(number)
        except UserError as error:
            yield error
        finally:
            self.close()

    def close(self) -> None:
        """Stop the threads of the iteration."""


class TokenStream(BlockStream):
    """The endless stream of a corpus's blocks.

    Global batch g has the draws [start + g·B·W, start + (g + 1)·B·W), with W devices.
    """

    def __init__(
        self, stores: Sequence[TokenStore], order: MixtureOrder, length: int, share: Share
    ) -> None:
        self.stores = stores
        self.order = order
        self.length = length
        self.share = share
        self.n_blocks = order.n_blocks
        self._next_look_ahead = 0  # the draw that looks for chunks again
        self._downloads: DownloadQueue = deque()

    def batch(self, number: int) -> TokenBlocks:
        first = self.first_draw(number)
        count = self.share.batch_size
        if first >= self._next_look_ahead:
            self._next_look_ahead = first + DRAWS_AHEAD // LOOKS_PER_WINDOW
            if any(store.cache for store in self.stores):
                self._download_ahead(first)
        arrays, blocks = self.order.draw(first, count)
        tokens = np.empty((count, self.length + 1), dtype=self.stores[0].dtype)
        for array in np.unique(arrays):
            in_array = arrays == array
            tokens[in_array] = self.stores[array].read_blocks(blocks[in_array], self.length)
        return TokenBlocks(tokens, None)

    def _download_ahead(self, first: int) -> None:
        """Start threads that download the chunks of the next draws.

        The chunks take at most half of the cache. Downloads of the last call that have not started
        are dropped.
        """
        self._downloads.clear()
        downloads = DownloadQueue()
        size = 0
        for store, chunk in self._chunks_of_draws(first, min(DRAWS_AHEAD, self.n_blocks)):
            cache = store.cache
            if cache is None:
                continue
            size += chunk.size
            if 2 * size <= cache.limit_bytes and not cache.has(chunk):
                downloads.append((cache, chunk))
        self._downloads = downloads
        for _ in range(min(DOWNLOAD_THREADS, len(downloads))):
            threading.Thread(target=_run_downloads, args=(downloads,), daemon=True).start()

    def _chunks_of_draws(self, first: int, count: int) -> Iterator[tuple[TokenStore, Chunk]]:
        """Yield each chunk that `count` draws read, in the order of their first use."""
        arrays, blocks = self.order.draw(first, count)
        # A block may end in the next chunk.
        numbers = np.empty((len(blocks), 2), dtype=np.int64)
        for array in np.unique(arrays):
            in_array = arrays == array
            bounds = blocks[in_array, None] * self.length + [0, self.length]
            numbers[in_array] = self.stores[array].chunk_numbers(bounds)
        uses = zip(np.repeat(arrays, 2).tolist(), numbers.ravel().tolist(), strict=True)
        for array, number in dict.fromkeys(uses):
            store = self.stores[array]
            yield store, store.array.chunks[number]

    def close(self) -> None:
        """Let each thread end after its current chunk. The next batch looks ahead again."""
        self._next_look_ahead = 0
        self._downloads.clear()


def _run_downloads(downloads: DownloadQueue) -> None:
    """Download chunks until the queue is empty."""
    with contextlib.suppress(IndexError):
        while True:
            cache, chunk = downloads.popleft()
            # If the reader needs this chunk and fails too, the reader reports the failure.
            with contextlib.suppress(UserError, OSError):
                cache.fetch(chunk, wait=False)


class EvaluationStream(BlockStream):
    """Every token of several arrays once, in order.

    All devices get the same number of batches, so that they stay in step. Rows past the end are
    left out, but every batch has a row, ignored if necessary.

    Args:
        stores: the arrays.
        length: targets per sequence.
        share: the rows of this device.
        end_of_document: the token that fills the last block of each array, as an ignored target.
        n_targets: number of targets to read, from the first on. None or more for all.
        n_blocks: number of blocks of these targets to read, evenly spread. None for all.
        whole_batches: whether to fill the last batch with ignored rows. Compiled code is made for
            a fixed number of rows. All is then filled with another token. Each `end_of_document`
            would be a document, and flash attention takes at most 65,535 (its issue 1786).
    """

    def __init__(
        self,
        stores: Sequence[TokenStore],
        length: int,
        share: Share,
        end_of_document: int,
        n_targets: int | None,
        n_blocks: int | None,
        whole_batches: bool = False,
    ) -> None:
        self.stores = stores
        self.length = length
        self.share = share
        self.filler = end_of_document
        self.whole_batches = whole_batches
        if whole_batches:
            self.filler = 1 if end_of_document == 0 else 0
        target_ends = np.cumsum([max(0, store.n_tokens - 1) for store in stores])
        last_target = target_ends[-1] if n_targets is None else n_targets
        self.targets = np.diff(np.minimum(target_ends, last_target), prepend=0)  # by array
        self.first_block = np.cumsum([0, *-(-self.targets // length)])
        self.available = int(self.first_block[-1])  # blocks of these targets
        self.n_blocks = self.available if n_blocks is None else min(n_blocks, self.available)
        self.n_batches = -(-self.n_blocks // share.sequences)

    def batch(self, number: int) -> TokenBlocks:
        first = self.first_draw(number)
        end = min(first + self.share.batch_size, self.n_blocks)
        n_rows = self.share.batch_size if self.whole_batches else max(1, end - first)
        shape = (n_rows, self.length + 1)
        tokens = np.full(shape, self.filler, dtype=self.stores[0].dtype)
        n_targets = np.zeros(n_rows, dtype=np.int64)
        for row, draw in enumerate(range(first, end)):
            # Each draw stands for an equal share of all blocks, and reads the middle block.
            block = (2 * draw + 1) * self.available // (2 * self.n_blocks)
            array = int(np.searchsorted(self.first_block, block, side="right")) - 1
            begin = (block - int(self.first_block[array])) * self.length
            count = min(self.length, int(self.targets[array]) - begin)
            n_targets[row] = count
            tokens[row, : count + 1] = self.stores[array].read(begin, count + 1)
        return TokenBlocks(tokens, n_targets)
