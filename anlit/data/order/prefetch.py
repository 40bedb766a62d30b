"""Remote chunks are fetched ahead of their use."""

import contextlib
import copy
import threading
from collections.abc import Iterator

from anlit.data.order.mixing import Order
from anlit.data.storage.cache import ChunkCache
from anlit.data.storage.shards import Chunk, Source
from anlit.errors import UserError

PREFETCH_THREADS = 4


class Prefetcher:
    """Threads that fetch the chunks that the order needs next.

    Args:
        order: gives (source, chunk) pairs for a draw.
        caches: of each source; None for a local one.
        sources: in the order's numbering.
    """

    def __init__(self, order: Order, sources: list[Source], caches: list[ChunkCache | None]) -> None:
        self.order, self.sources, self.caches = copy.deepcopy(order), sources, caches
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
        for source, number in self.order.chunks_ahead(self._draw):
            cache, chunk = self.caches[source], self.sources[source].chunks[number]
            if cache is None:
                continue
            size += chunk.size
            if 2 * size > cache.limit_bytes:
                return
            if not cache.has(chunk):
                yield cache, chunk
