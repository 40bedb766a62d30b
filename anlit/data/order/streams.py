"""Streams of batches, read from token stores by a loader: endless for training, finite for evaluation."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from anlit.data.order.mixing import MixtureOrder
from anlit.data.order.prefetch import Prefetcher
from anlit.data.storage.store import TokenStore
from anlit.errors import UserError


class Blocks(NamedTuple):
    """What a loader's workers send: a batch in its shortest form."""

    tokens: np.ndarray
    """(B, T + 1), two or four bytes each."""
    n_targets: np.ndarray | None
    """(B,) how many targets of each row count; None for all."""


@dataclass(frozen=True)
class Share:
    """Which sequences of a global batch this device gets."""

    batch_size: int
    """B, sequences per device."""
    rank: int = 0
    world_size: int = 1

    @property
    def sequences(self) -> int:
        """Sequences of a global batch."""
        return self.batch_size * self.world_size


class BlockStream(IterableDataset):
    """A stream of batches of which worker w of n makes the numbers w, w + n, …

    torch's DataLoader asks its workers in turn, so what it yields does not depend on how many there are. A worker
    sends a UserError instead of raising it: torch would wrap it into a traceback.
    """

    share: Share
    """The rows that are this device's."""
    n_batches: int | None = None
    """Batches of each device; None: the stream has no end."""
    n_blocks: int
    """Sequences that all devices together read: all of them, or those of an epoch."""
    start = 0
    """Sequences that all devices have drawn before the first batch."""

    def batch(self, number: int) -> Blocks:
        """One batch."""
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
    """The endless stream of a corpus's blocks: global batch g has the draws [start + g·B·W, start + (g + 1)·B·W).

    Args:
        stores: of the order's sources.
        order: what each draw is.
        length: T.
        share: the rows that are this device's.
    """

    def __init__(self, stores: Sequence[TokenStore], order: MixtureOrder, length: int, share: Share) -> None:
        self.stores, self.order, self.length, self.share = list(stores), order, length, share
        self.n_blocks = order.n_blocks
        self._prefetcher: Prefetcher | None = None

    def batch(self, number: int) -> Blocks:
        share, first = self.share, self.first_draw(number)
        if self._prefetcher is None and any(store.cache for store in self.stores):
            self._prefetcher = Prefetcher(self.order, self.length, self.stores)
        if self._prefetcher is not None:
            self._prefetcher.at(first)
        sources, blocks = self.order.draw(first, share.batch_size)
        if len(self.stores) == 1:
            return Blocks(self.stores[0].read_blocks(blocks, self.length), None)
        tokens = np.empty((share.batch_size, self.length + 1), dtype=self.stores[0].dtype)
        for source in np.unique(sources):
            mine = sources == source
            tokens[mine] = self.stores[source].read_blocks(blocks[mine], self.length)
        return Blocks(tokens, None)

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.stop()
            self._prefetcher = None


class EvaluationStream(BlockStream):
    """Every token of some sources once, in their order; the last block of each is filled up with ignored targets.

    All devices get the same number of batches. Rows past the end are left out, but every batch has at least one row,
    ignored if need be, so that devices stay in step.

    Args:
        stores: what to evaluate, one after the other.
        length: T.
        share: the rows that are this device's.
        end_of_document: the token that fills up the last block.
        n_targets: evaluate so many targets, the first ones; all if None.
        n_blocks: evaluate so many of their blocks, evenly spread; all if None, or if there are fewer.
    """

    def __init__(
        self,
        stores: Sequence[TokenStore],
        length: int,
        share: Share,
        end_of_document: int,
        n_targets: int | None,
        n_blocks: int | None = None,
    ) -> None:
        self.stores, self.length, self.share = list(stores), length, share
        self.end_of_document = end_of_document
        ends = np.cumsum([max(0, store.n_tokens - 1) for store in stores])
        self.targets = np.diff(np.minimum(ends, ends[-1] if n_targets is None else n_targets), prepend=0)
        """Targets of each source that are evaluated."""
        self.n_targets = int(self.targets.sum())
        self.first_block = np.cumsum([0, *-(-self.targets // length)])
        self.available = int(self.first_block[-1])
        """Blocks there are."""
        self.n_blocks = self.available if n_blocks is None else min(n_blocks, self.available)
        self.n_batches = -(-self.n_blocks // share.sequences)

    def batch(self, number: int) -> Blocks:
        first = self.first_draw(number)
        end = min(first + self.share.batch_size, self.n_blocks)
        rows = max(1, end - first)
        tokens = np.full((rows, self.length + 1), self.end_of_document, dtype=self.stores[0].dtype)
        n_targets = np.zeros(rows, dtype=np.int64)
        for row, place in enumerate(range(first, end)):
            block = (2 * place + 1) * self.available // (2 * self.n_blocks)  # in the middle of its share of them all
            source = int(np.searchsorted(self.first_block, block, side="right")) - 1
            begin = (block - int(self.first_block[source])) * self.length
            n_targets[row] = count = min(self.length, int(self.targets[source]) - begin)
            tokens[row, : count + 1] = self.stores[source].read(begin, count + 1)
        return Blocks(tokens, n_targets)
