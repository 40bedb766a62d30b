"""Remote chunks are fetched ahead of their use."""

import contextlib
import copy
import threading
from collections.abc import Iterator

import numpy as np

from anlit.data.order.mixing import Order
from anlit.data.storage.cache import ChunkCache
from anlit.data.storage.shards import Chunk, Source
from anlit.errors import UserError

PREFETCH_THREADS = 4
DRAWS_AHEAD = 65_536


class Prefetcher:
    """Threads that fetch the chunks that the order needs next.

    Args:
        order: which block of which source each draw is.
        length: targets in a block.
        caches: of each source; None for a local one.
        sources: in the order's numbering.
    """

    def __init__(self, order: Order, length: int, sources: list[Source], caches: list[ChunkCache | None]) -> None:
        self.order, self.length, self.sources, self.caches = copy.deepcopy(order), length, sources, caches
        self.ends = [np.cumsum([chunk.tokens for chunk in source.chunks]) for source in sources]
        self._draw = 0
        self._stopped, self._order_lock = threading.Event(), threading.Lock()
        self._is_running = False

    def at(self, draw: int) -> None:
        """Report that the reader has come to draw number `draw`; the first call starts the threads."""
        self._draw = draw
        if not self._is_running:
            self._is_running = True
            for number in range(PREFETCH_THREADS):
                threading.Thread(target=self._run, args=(number,), daemon=True).start()

    def stop(self) -> None:
        """End the threads; one that is fetching a chunk finishes it first."""
        self._stopped.set()

    def _run(self, number: int) -> None:
        """Fetch every `PREFETCH_THREADS`-th chunk, except those that another thread or process is fetching."""
        while not self._stopped.is_set():
            with self._order_lock:  # an order keeps its last permutation
                wanted = list(self._wanted())
            for cache, chunk in wanted[number::PREFETCH_THREADS]:
                if self._stopped.is_set():
                    return
                # A failure here is the reader's to report, if it comes to need the chunk and fails as well.
                with contextlib.suppress(UserError, OSError):
                    cache.fetch(chunk, wait=False)
            self._stopped.wait(1)

    def _wanted(self) -> Iterator[tuple[ChunkCache, Chunk]]:
        """Chunks not there yet, soonest first, as far as half the cache holds them."""
        size = 0
        for source, number in self._chunks_ahead():
            cache, chunk = self.caches[source], self.sources[source].chunks[number]
            if cache is None:
                continue
            size += chunk.size
            if 2 * size > cache.limit_bytes:
                return
            if not cache.has(chunk):
                yield cache, chunk

    def _chunks_ahead(self) -> Iterator[tuple[int, int]]:
        """Source and chunk of the next draws, each once; a block may end in the chunk after the one it begins in."""
        sources, blocks = self.order.draw(self._draw, min(DRAWS_AHEAD, self.order.n_blocks))
        chunks = np.empty((len(blocks), 2), dtype=np.int64)
        for source in np.unique(sources):
            mine = sources == source
            tokens = blocks[mine, None] * self.length + [0, self.length]
            chunks[mine] = np.searchsorted(self.ends[source], tokens, side="right")
        pairs = np.stack([np.repeat(sources, 2), chunks.ravel()], axis=1)
        _, first = np.unique(pairs, axis=0, return_index=True)
        return map(tuple, pairs[np.sort(first)].tolist())
