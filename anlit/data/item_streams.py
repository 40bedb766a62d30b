"""Batches of a dataset's items, each an array of tokens: an order that resumes, or an iteration.

Legend: B sequences per device and batch, W devices.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np

from anlit.data.batch import Batch
from anlit.data.order import MOST_WINDOW_BLOCKS, BlockOrder
from anlit.data.streams import BlockStream, Share, TokenBlocks
from anlit.errors import UserError

ITEMS_PER_CHUNK = 4096
"""Items that a pass keeps together until it mixes a window of about a million."""
ENDLESS = 1 << 40
"""Batches in an epoch of data without a length. Lightning reads ahead if there is no number."""


class Items(Protocol):
    """A map-style dataset, such as `torch.utils.data.Dataset` with a length, or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def item_order(n_items: int, shuffle: bool, seed: int) -> BlockOrder:
    """Return the order in which training draws `n_items` items; every pass has each once."""
    chunks = np.full(-(-n_items // ITEMS_PER_CHUNK), ITEMS_PER_CHUNK)
    chunks[-1:] -= chunks.sum() - n_items
    return BlockOrder([chunks], shuffle, seed, MOST_WINDOW_BLOCKS)


class ItemStream(BlockStream):
    """The endless stream of a dataset's items for training.

    Global batch g has the draws [start + g·B·W, start + (g + 1)·B·W).
    """

    def __init__(self, items: Items, order: BlockOrder, share: Share, name: str) -> None:
        self.items = items
        self.order = order
        self.share = share
        self.name = name
        self.n_blocks = order.n_blocks

    def batch(self, number: int) -> TokenBlocks:
        _, indices = self.order.draw(self.first_draw(number), self.share.batch_size)
        return pad_rows([token_row(self.items[int(index)], self.name) for index in indices])


class ItemEvaluation(BlockStream):
    """Every item once, in order.

    All devices get the same number of batches. A batch past the end has one row that is ignored.
    """

    def __init__(self, items: Items, share: Share, name: str) -> None:
        self.items = items
        self.share = share
        self.name = name
        self.n_blocks = len(items)
        self.n_batches = -(-self.n_blocks // share.sequences)

    def batch(self, number: int) -> TokenBlocks:
        first = self.first_draw(number)
        end = min(first + self.share.batch_size, self.n_blocks)
        rows = [token_row(self.items[index], self.name) for index in range(first, end)]
        if not rows:
            return TokenBlocks(np.zeros((1, 2), dtype=np.int64), np.zeros(1, dtype=np.int64))
        return pad_rows(rows)


class IterationLoader:
    """Training batches of an iterable dataset, again and again without end.

    Every device iterates over all items and takes its rows of each global batch, so the devices
    have one position. A dataset with `state_dict` and `load_state_dict` continues where it was.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        make_batch: Callable[[TokenBlocks], Batch],
        share: Share,
        name: str,
        micro_batches: int = 1,
    ) -> None:
        self.dataset: Any = dataset
        self.make_batch = make_batch
        self.share = share
        self.name = name
        self.micro_batches = micro_batches
        self._items: Iterator[Any] | None = None

    def __len__(self) -> int:
        return ENDLESS // self.micro_batches * self.micro_batches

    def __iter__(self) -> Iterator[Batch]:
        first_row = self.share.rank * self.share.batch_size
        for _ in range(len(self)):
            if self._items is None:
                self._items = self._repeat()
            items = list(islice(self._items, self.share.sequences))
            rows = items[first_row : first_row + self.share.batch_size]
            yield self.make_batch(pad_rows([token_row(item, self.name) for item in rows]))

    def _repeat(self) -> Iterator[Any]:
        # The first iteration after `load_state_dict` may have nothing left.
        n_empty = 0
        while n_empty < 2:
            n_empty += 1
            for item in self.dataset:
                n_empty = 0
                yield item
        raise UserError(f"{self.name} has no items: give a dataset with at least one")

    @property
    def saves_position(self) -> bool:
        """Whether the dataset can save its position."""
        return hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's position, {} if it saves none."""
        return {"dataset": self.dataset.state_dict()} if self.saves_position else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position from `state_dict`."""
        if self.saves_position and "dataset" in state:
            self.dataset.load_state_dict(state["dataset"])
        self.close()

    def close(self) -> None:
        """The next batch begins a new iteration of the dataset."""
        self._items = None


def token_row(item: Any, name: str) -> np.ndarray:
    """Return the tokens of an item, (n,) int64; the first n − 1 are input, the last n − 1 targets.

    An item is an array, a list or a tensor, a tuple with one of these (as `TensorDataset` has), or
    a mapping with `input_ids`. Raises UserError, which names the dataset, for anything else.
    """
    if isinstance(item, tuple) and len(item) == 1:
        (item,) = item
    if isinstance(item, Mapping) and "input_ids" in item:
        item = item["input_ids"]
    try:
        row = np.asarray(item)
    except (ValueError, TypeError, RuntimeError):  # rows of different lengths, a GPU's tensor
        row = np.empty(0)
    if row.ndim != 1 or row.dtype.kind not in "iu" or len(row) < 2:
        kind = type(item).__name__
        raise UserError(
            f"{name} has an item that is a {kind} of shape {row.shape} and type {row.dtype}: give "
            "two or more tokens as an array of integers, or a mapping with input_ids"
        )
    return row.astype(np.int64)


def pad_rows(rows: Sequence[np.ndarray]) -> TokenBlocks:
    """Return rows of n ≥ 2 tokens as one array, (B, longest); what is filled up does not count."""
    lengths = np.array([len(row) for row in rows])
    if (lengths == lengths[0]).all():
        return TokenBlocks(np.stack(rows), None)
    tokens = np.zeros((len(rows), lengths.max()), dtype=np.int64)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    return TokenBlocks(tokens, lengths - 1)
