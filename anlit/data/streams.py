"""Streams of batches, read from token stores: endless for training, finite for evaluation; and the loaders of them."""

import contextlib
import errno
import itertools
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from anlit.data.batch import Batch
from anlit.data.order import MixtureOrder
from anlit.data.storage.shards import Chunk
from anlit.data.storage.store import ChunkCache, TokenStore
from anlit.errors import RunError, UserError
from anlit.signals import leave_signals_to_parent, signals_held

DRAWS_AHEAD = 65_536  # remote chunks are fetched so many draws before their use
FETCH_THREADS = 4
START_METHOD = "fork" if sys.platform == "linux" else None
"""How data workers start: forked, in 0.01 s and with all imports, whatever Python's default is."""
START_FIXES = {
    errno.ENOSPC: "make room in /dev/shm",
    errno.EAGAIN: "raise the limit of processes (ulimit -u)",
    errno.ENOMEM: "free memory",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
"""Why worker processes cannot be started → what to do."""
Wanted = deque[tuple[ChunkCache, Chunk]]
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Blocks(NamedTuple):
    """What a loader's workers send: a batch in its shortest form."""

    tokens: np.ndarray  # (B, T + 1), two or four bytes each
    n_targets: np.ndarray | None  # (B,) how many targets of each row count; None for all


@dataclass(frozen=True)
class Share:
    """Which sequences of a global batch this device gets."""

    batch_size: int  # B, sequences per device
    rank: int = 0
    world_size: int = 1

    @property
    def sequences(self) -> int:  # of a global batch
        return self.batch_size * self.world_size


class BlockStream(IterableDataset):
    """A stream of batches of which worker w of n makes the numbers w, w + n, …

    torch's DataLoader asks its workers in turn, so what it yields does not depend on how many there are. A worker
    sends a UserError instead of raising it: torch would wrap it into a traceback.
    """

    share: Share  # the rows that are this device's
    n_batches: int | None = None  # batches of each device; None: the stream has no end
    n_blocks: int  # sequences that all devices together read: all of them, or those of an epoch
    start = 0  # sequences that all devices have drawn before the first batch

    def batch(self, number: int) -> Blocks:
        raise NotImplementedError

    def first_draw(self, number: int) -> int:
        """The first of the sequences that are this device's part of a global batch."""
        return self.start + number * self.share.sequences + self.share.rank * self.share.batch_size

    def __iter__(self) -> Iterator[Blocks | UserError]:
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
    """The endless stream of a corpus's blocks: global batch g has the draws [start + g·B·W, start + (g + 1)·B·W)."""

    def __init__(
        self, stores: Sequence[TokenStore], order: MixtureOrder, length: int, share: Share
    ) -> None:
        self.stores, self.order, self.length, self.share = stores, order, length, share
        self.n_blocks = order.n_blocks
        self._look_ahead_at = 0  # draw
        self._wanted: Wanted = deque()

    def batch(self, number: int) -> Blocks:
        first, count = self.first_draw(number), self.share.batch_size
        if first >= self._look_ahead_at:
            self._look_ahead_at = first + DRAWS_AHEAD // 16
            if any(store.cache for store in self.stores):
                self._fetch_ahead(first)
        sources, blocks = self.order.draw(first, count)
        if len(self.stores) == 1:
            return Blocks(self.stores[0].read_blocks(blocks, self.length), None)
        tokens = np.empty((count, self.length + 1), dtype=self.stores[0].dtype)
        for source in np.unique(sources):
            mine = sources == source
            tokens[mine] = self.stores[source].read_blocks(blocks[mine], self.length)
        return Blocks(tokens, None)

    def _fetch_ahead(self, first: int) -> None:
        """Have threads fetch the chunks of the next draws that are not there yet, as far as half the cache holds them.

        Those that the last call asked for and that no thread has begun are given up.
        """
        sources, blocks = self.order.draw(first, min(DRAWS_AHEAD, self.n_blocks))
        chunks = np.empty(
            (len(blocks), 2), dtype=np.int64
        )  # a block may end in the chunk after the one it begins in
        for source in np.unique(sources):
            mine = sources == source
            chunks[mine] = self.stores[source].chunks_of(
                blocks[mine, None] * self.length + [0, self.length]
            )
        self._wanted.clear()
        size, wanted = 0, Wanted()
        for source, number in dict.fromkeys(
            zip(np.repeat(sources, 2).tolist(), chunks.ravel().tolist(), strict=True)
        ):
            cache, chunk = self.stores[source].cache, self.stores[source].source.chunks[number]
            if (
                cache is not None
                and 2 * (size := size + chunk.size) <= cache.limit_bytes
                and not cache.has(chunk)
            ):
                wanted.append((cache, chunk))
        self._wanted = wanted
        for _ in range(min(FETCH_THREADS, len(wanted))):
            threading.Thread(target=_fetch, args=(wanted,), daemon=True).start()

    def close(self) -> None:
        """Let the threads end after the chunk that each is fetching, and the next batch look ahead anew."""
        self._look_ahead_at = 0
        self._wanted.clear()


def _fetch(wanted: Wanted) -> None:
    with contextlib.suppress(IndexError):  # nothing is left
        while True:
            cache, chunk = wanted.popleft()
            # A failure here is the reader's to report, if it comes to need the chunk and fails as well.
            with contextlib.suppress(UserError, OSError):
                cache.fetch(chunk, wait=False)


class EvaluationStream(BlockStream):
    """Every token of some sources once, in their order; `end_of_document` and ignored targets fill up the last blocks.

    It may be the first `n_targets` alone, and of their blocks `n_blocks`, evenly spread; None, or more than there are,
    stands for all. All devices get the same number of batches. Rows past the end are left out, but every batch has at
    least one row, ignored if need be, so that devices stay in step. With `whole_batches` all of them are there,
    ignored: compiled code is made for one number of rows.
    """

    def __init__(
        self, stores: Sequence[TokenStore], length: int, share: Share, end_of_document: int, n_targets: int | None,
        n_blocks: int | None, whole_batches: bool = False,
    ) -> None:  # fmt: skip
        self.whole_batches = whole_batches
        self.stores, self.length, self.share, self.end_of_document = (
            stores,
            length,
            share,
            end_of_document,
        )
        ends = np.cumsum([max(0, store.n_tokens - 1) for store in stores])
        self.targets = np.diff(
            np.minimum(ends, ends[-1] if n_targets is None else n_targets), prepend=0
        )  # by source
        self.first_block = np.cumsum([0, *-(-self.targets // length)])
        self.available = int(self.first_block[-1])  # blocks there are
        self.n_blocks = self.available if n_blocks is None else min(n_blocks, self.available)
        self.n_batches = -(-self.n_blocks // share.sequences)

    def batch(self, number: int) -> Blocks:
        first = self.first_draw(number)
        end = min(first + self.share.batch_size, self.n_blocks)
        rows = self.share.batch_size if self.whole_batches else max(1, end - first)
        tokens = np.full((rows, self.length + 1), self.end_of_document, dtype=self.stores[0].dtype)
        n_targets = np.zeros(rows, dtype=np.int64)
        for row, place in enumerate(range(first, end)):
            block = (
                (2 * place + 1) * self.available // (2 * self.n_blocks)
            )  # in the middle of its share of them all
            source = int(np.searchsorted(self.first_block, block, side="right")) - 1
            begin = (block - int(self.first_block[source])) * self.length
            n_targets[row] = count = min(self.length, int(self.targets[source]) - begin)
            tokens[row, : count + 1] = self.stores[source].read(begin, count + 1)
        return Blocks(tokens, n_targets)


class Loader:
    """Batches of a finite stream, from its beginning at each iteration.

    Worker processes read the blocks, and the process that uses the batches makes them; a thread of it makes up to
    `n_ahead` batches before they are asked for. It wraps a DataLoader and is not one itself, because Lightning
    rebuilds every DataLoader and would lose its place.
    """

    def __init__(
        self,
        stream: BlockStream,
        make_batch: Callable[[Blocks], Batch],
        num_workers: int = 0,
        n_ahead: int = 0,
    ) -> None:
        self.stream, self.make_batch = stream, make_batch
        self.num_workers, self.n_ahead = num_workers, n_ahead

    def __len__(self) -> int:
        assert self.stream.n_batches is not None
        return self.stream.n_batches

    def __iter__(self) -> Iterator[Batch]:
        # A generator, because it draws a number, by default from the model's. torch's default for collate_fn makes
        # tensors of the arrays, which cost more to send.
        options: dict[str, Any] = {"generator": torch.Generator(), "collate_fn": _as_they_are}
        if self.num_workers:
            options["worker_init_fn"] = leave_signals_to_parent
            options["multiprocessing_context"] = START_METHOD
        loader = DataLoader(self.stream, batch_size=None, num_workers=self.num_workers, **options)
        batches = self._make_batches(self._start(loader))
        yield from made_ahead(batches, self.n_ahead) if self.n_ahead else batches

    def _make_batches(self, blocks: Iterator[Any]) -> Iterator[Batch]:
        for item in blocks:
            if isinstance(item, UserError):
                raise item
            yield self.make_batch(item)

    def _start(self, loader: DataLoader) -> Iterator[Any]:
        """Start the worker processes; RunError where the machine has no room for them."""
        try:
            with signals_held():
                return iter(loader)
        except OSError as error:
            if not self.num_workers:
                raise
            fix = START_FIXES.get(error.errno or 0, "lower data.num_workers")
            raise RunError(
                f"the {self.num_workers} processes of data.num_workers cannot be started "
                f"({error.strerror}): {fix}, or set --data.num_workers 0"
            ) from error


def made_ahead(items: Iterator[T], n: int) -> Iterator[T]:
    """The items in their order. A thread makes up to n of them before they are asked for.

    An error in making an item is raised where that item is asked for. Closing the iterator waits for the thread.
    """
    thread = ThreadPoolExecutor(1, "batches")
    try:
        waiting = deque(thread.submit(next, items, None) for _ in range(n))
        while (item := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(next, items, None))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)


def _as_they_are(blocks: Any) -> Any:
    return blocks


class ResumableLoader(Loader):
    """Training batches whose place in the stream can be saved and restored; they do not depend on `num_workers`.

    The stream has no end. An epoch has about as many batches as the sources fill once, and whole optimizer steps of
    `micro_batches`. The next epoch continues where it ended, with the same worker processes, so nothing is left out at
    an epoch's end. `identity` has the settings that a place in the stream depends on, by name: texts, seed, …
    """

    def __init__(
        self, stream: BlockStream, make_batch: Callable[[Blocks], Batch], num_workers: int, identity: dict[str, Any],
        micro_batches: int = 1, n_ahead: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(stream, make_batch, num_workers, n_ahead)
        self.identity, self.micro_batches = identity, micro_batches
        self.drawn = 0  # sequences that all devices together have drawn
        self._running: Iterator[Batch] | None = None

    def __len__(self) -> int:
        batches = self.stream.n_blocks // self.stream.share.sequences
        return max(1, batches // self.micro_batches) * self.micro_batches

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(len(self)):
            if self._running is None:
                self.stream.start = self.drawn
                self._running = super().__iter__()
            batch = next(self._running)
            self.drawn += self.stream.share.sequences
            yield batch

    def close(self) -> None:
        """End the workers; iterating begins new ones at the same place."""
        self._running = None

    def state_dict(self) -> dict[str, Any]:
        share = self.stream.share
        split = {
            "batch_size": share.batch_size,
            "devices": share.world_size,
            "num_workers": self.num_workers,
        }
        return {"drawn": self.drawn, "identity": self.identity, "split": split}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a place that `state_dict` gave; UserError if it is one in other data or in another order."""
        then, split = state.get("identity", {}), self.state_dict()["split"]
        for name, now in self.identity.items():
            if then.get(name) != now:
                raise UserError(
                    f"The checkpoint's place in the data is for {name} {then.get(name)} and this run has {now}: "
                    "set it back, or start from the weights alone."
                )
        changed = ", ".join(
            f"{key} {old} → {split[key]}"
            for key, old in state["split"].items()
            if old != split[key]
        )
        if changed and self.stream.share.rank == 0 and self.drawn != state["drawn"]:
            place = (
                f"the data go on after sequence {state['drawn']:,}, none is repeated or left out"
            )
            _log.info(f"Resuming with {changed}: {place}.")
        self.drawn = state["drawn"]
        self.close()
