"""Remote chunks are fetched ahead of their use."""

import contextlib
import copy
import threading
from collections.abc import Iterator

import numpy as np

from anlit.data.order.mixing import MixtureOrder
from anlit.data.storage.shards import Chunk
from anlit.data.storage.store import ChunkCache, TokenStore
from anlit.errors import UserError

PREFETCH_THREADS = 4
DRAWS_AHEAD = 65_536


class Prefetcher:
    """Threads that fetch the chunks that the order needs next.

    Args:
        order: which block of which source each draw is.
        length: targets in a block.
        stores: of the order's sources.
    """

    def __init__(self, order: MixtureOrder, length: int, stores: list[TokenStore]) -> None:
        self.order, self.length, self.stores = copy.deepcopy(order), length, stores
        self._draw = 0
        self._stopped, self._order_lock = threading.Event(), threading.Lock()
        self._threads: list[threading.Thread] = []

    def at(self, draw: int) -> None:
        """Report that the reader has come to draw number `draw`; the first call starts the threads."""
        self._draw = draw
        while len(self._threads) < PREFETCH_THREADS:
            self._threads.append(threading.Thread(target=self._run, args=(len(self._threads),), daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """End the threads; one that is fetching a chunk finishes it first."""
        self._stopped.set()

    def _run(self, number: int) -> None:
        """Fetch every `PREFETCH_THREADS`-th chunk, except those that another thread or process is fetching."""
        while not self._stopped.is_set():
            with self._order_lock:  # an order keeps its last permutation
                chunks = list(self._chunks_to_fetch())
            for cache, chunk in chunks[number::PREFETCH_THREADS]:
                if self._stopped.is_set():
                    return
                # A failure here is the reader's to report, if it comes to need the chunk and fails as well.
                with contextlib.suppress(UserError, OSError):
                    cache.fetch(chunk, wait=False)
            self._stopped.wait(1)

    def _chunks_to_fetch(self) -> Iterator[tuple[ChunkCache, Chunk]]:
        """Chunks not there yet, soonest first, as far as half the cache holds them."""
        sources, blocks = self.order.draw(self._draw, min(DRAWS_AHEAD, self.order.n_blocks))
        chunks = np.empty((len(blocks), 2), dtype=np.int64)  # a block may end in the chunk after the one it begins in
        for source in np.unique(sources):
            mine = sources == source
            chunks[mine] = self.stores[source].chunks_of(blocks[mine, None] * self.length + [0, self.length])
        size = 0
        for source, number in dict.fromkeys(zip(np.repeat(sources, 2).tolist(), chunks.ravel().tolist(), strict=True)):
            store = self.stores[source]
            if store.cache is None:
                continue
            chunk = store.source.chunks[number]
            size += chunk.size
            if 2 * size > store.cache.limit_bytes:
                return
            if not store.cache.has(chunk):
                yield store.cache, chunk
