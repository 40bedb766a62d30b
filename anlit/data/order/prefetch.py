"""Remote chunks are fetched ahead of their use."""

import contextlib
import copy
import threading
from collections.abc import Iterable, Iterator

from anlit.data.order.mixing import Order
from anlit.data.storage.cache import ChunkCache
from anlit.data.storage.shards import Chunk, Source
from anlit.errors import UserError

PREFETCH_THREADS = 4


class Prefetcher:
    """Threads that fetch the chunks which the order needs next.

    Args:
        order: gives (source, chunk) pairs for a draw.
        caches: of each source; None for a local one.
        sources: in the order's numbering.
    """

    def __init__(self, order: Order, sources: list[Source], caches: list[ChunkCache | None]) -> None:
        self.order, self.sources, self.caches = copy.deepcopy(order), sources, caches
        self._draw = 0
        self._moved, self._stopped = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def at(self, draw: int) -> None:
        """Tell how far the reader is."""
        self._draw = draw
        self._moved.set()
        if not self._threads:
            self._threads = [threading.Thread(target=self._run, daemon=True)]
            self._threads[0].start()

    def stop(self) -> None:
        self._stopped.set()
        self._moved.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._moved.wait()
            self._moved.clear()
            helpers = [threading.Thread(target=self._fetch, args=(part,), daemon=True) for part in self._parts()]
            for helper in helpers:
                helper.start()
            for helper in helpers:
                helper.join()
            self._stopped.wait(1)

    def _parts(self) -> list[list[tuple[ChunkCache, Chunk]]]:
        wanted = list(self._wanted())
        return [part for first in range(PREFETCH_THREADS) if (part := wanted[first::PREFETCH_THREADS])]

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

    def _fetch(self, wanted: Iterable[tuple[ChunkCache, Chunk]]) -> None:
        for cache, chunk in wanted:
            if self._stopped.is_set():
                return
            # A failure here is the reader's to report, if it comes to need the chunk and fails as well.
            with contextlib.suppress(UserError, OSError):
                cache.fetch(chunk, wait=False)
