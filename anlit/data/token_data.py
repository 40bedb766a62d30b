"""The DataModule of datasets in Python: torch's `Dataset`, a list, or an iteration of tokens.

Legend: B sequences per device and batch, W devices.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from anlit.config.value_checks import check_ranges
from anlit.data.batch import Batch, batch_from_blocks
from anlit.data.loaders import Loader, ResumableData, ResumableLoader
from anlit.data.order import MOST_WINDOW_BLOCKS, BlockOrder
from anlit.data.streams import BlockStream, Share, TokenBlocks
from anlit.errors import UserError

NO_TOKEN = -1
"""The end-of-document token of rows that are one document each."""
ITEMS_PER_CHUNK = 4096
"""Items that a pass keeps together until it mixes a window of about a million."""
ENDLESS = 1 << 40
"""Batches in an epoch of data without a length. Lightning reads ahead if there is no number."""


def item_order(n_items: int, shuffle: bool, seed: int) -> BlockOrder:
    """Return the order in which training draws `n_items` items. Every pass has each once."""
    chunks = np.full(-(-n_items // ITEMS_PER_CHUNK), ITEMS_PER_CHUNK)
    chunks[-1:] -= chunks.sum() - n_items
    return BlockOrder([chunks], shuffle, seed, MOST_WINDOW_BLOCKS)


class ItemStream(BlockStream):
    """The endless stream of a dataset's items for training.

    Global batch g has the draws [start + g·B·W, start + (g + 1)·B·W).
    """

    def __init__(self, items: Any, order: BlockOrder, share: Share) -> None:
        self.items = items
        self.order = order
        self.share = share
        self.n_blocks = order.n_blocks

    def batch(self, number: int) -> TokenBlocks:
        _, indices = self.order.draw(self.first_draw(number), self.share.batch_size)
        return pad_rows([token_row(self.items[int(index)]) for index in indices])


class ItemEvaluation(BlockStream):
    """Every item once, in order.

    All devices get the same number of batches. A batch past the end has one row that is ignored.
    """

    def __init__(self, items: Any, share: Share) -> None:
        self.items = items
        self.share = share
        self.n_blocks = len(items)
        self.n_batches = -(-self.n_blocks // share.sequences)

    def batch(self, number: int) -> TokenBlocks:
        first = self.first_draw(number)
        end = min(first + self.share.batch_size, self.n_blocks)
        rows = [token_row(self.items[index]) for index in range(first, end)]
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
        micro_batches: int,
    ) -> None:
        self.dataset: Any = dataset
        self.make_batch = make_batch
        self.share = share
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
            yield self.make_batch(pad_rows([token_row(item) for item in rows]))

    def _repeat(self) -> Iterator[Any]:
        # The first iteration after `load_state_dict` may have nothing left.
        n_empty = 0
        while n_empty < 2:
            n_empty += 1
            for item in self.dataset:
                n_empty = 0
                yield item
        raise UserError("TokenData.train has no items: give a dataset with at least one")

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


def token_row(item: Any) -> np.ndarray:
    """Return the tokens of an item, (n,) int64. The first n − 1 are input, the last n − 1 targets.

    An item is an array, a list or a tensor, a tuple with one of these (as `TensorDataset` has), or
    a mapping with `input_ids`. Raises UserError for anything else.
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
            f"TokenData has an item that is a {kind} of shape {row.shape} and type {row.dtype}: "
            "give two or more tokens as an array of integers, or a mapping with input_ids"
        )
    return row.astype(np.int64)


def pad_rows(rows: Sequence[np.ndarray]) -> TokenBlocks:
    """Return rows of n ≥ 2 tokens as one array, (B, longest). What is filled up does not count."""
    lengths = np.array([len(row) for row in rows])
    if (lengths == lengths[0]).all():
        return TokenBlocks(np.stack(rows), None)
    tokens = np.zeros((len(rows), lengths.max()), dtype=np.int64)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    return TokenBlocks(tokens, lengths - 1)


class TokenData(ResumableData):
    """Batches of datasets whose items are arrays of tokens.

    An item has n ≥ 2 tokens: a list, an array or tensor (n,), or a mapping with `input_ids`. Its
    first n − 1 tokens are input, its last n − 1 the targets. Shorter rows of a batch are filled up,
    which does not count in the loss.

    With a length and `__getitem__`, `seed` alone decides the order of training, whatever the
    number of workers and devices. Every item comes once before any comes again. Every checkpoint
    has the position in that order. An iterable dataset is read again and again. Its position is in
    the checkpoints if it has `state_dict` and `load_state_dict`, as those of Hugging Face have.
    Every device iterates over all of its items and takes its share.

    Args:
        train: dataset of training, with a length or iterable.
        val: dataset of validation, with a length. None for no validation.
        test: dataset of the test, with a length. None for no test.
        vocab_size: number of tokens in the vocabulary. None if the model gives it.
        batch_size: sequences per device and micro-batch.
        num_workers: loader processes per device for training on a dataset with a length.
        shuffle: whether to shuffle a dataset with a length.
        seed: seed of the order.
        val_batch_size: sequences per device and validation batch. By default batch_size.
        end_of_document: the token that ends a document inside of an item. By default an item is one
            document.
        bytes_per_token: bytes of the validation text per token. None for no bits per byte.
        tokenizer: a tokenizer of the tokenizers library, a fast one of transformers, or the path of
            a tokenizer.json. None if there is none.
        fingerprint: a text that names data and version, by which `anlit compare` knows them. None
            if they need not be known.
    """

    def __init__(
        self,
        train: Dataset,
        val: Dataset | None = None,
        test: Dataset | None = None,
        vocab_size: int | None = None,
        batch_size: int = 8,
        num_workers: int = 0,
        shuffle: bool = True,
        seed: int = 42,
        val_batch_size: int | None = None,
        end_of_document: int | None = None,
        bytes_per_token: float | None = None,
        tokenizer: Any = None,
        fingerprint: str | None = None,
    ) -> None:
        check_ranges("data", locals())  # first: `locals()` must be the arguments alone
        super().__init__()
        self.train: Any = train
        self.val: Any = val
        self.test: Any = test
        self.vocab_size = vocab_size
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.shuffle = shuffle
        self.seed = seed
        self.val_batch_size = val_batch_size or batch_size
        self.end_of_document = end_of_document
        self.bytes_per_token = bytes_per_token
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint

    @property
    def saves_position(self) -> bool:
        return has_length(self.train) or hasattr(self.train, "state_dict")

    def setup(self, stage: str | None = None) -> None:
        """Check the datasets. Raise UserError if one is empty, or lacks a length that it needs."""
        self.teardown("fit")  # forgets the position of an earlier run with this object
        for name in ("train", "val", "test"):
            dataset = getattr(self, name)
            if dataset is None and name != "train":
                continue
            if has_length(dataset) and len(dataset) == 0:
                raise UserError(f"TokenData.{name} is empty: give a dataset with at least one item")
            if not has_length(dataset) and not (name == "train" and hasattr(dataset, "__iter__")):
                raise UserError(
                    f"TokenData.{name} is a {type(dataset).__name__}: give a dataset with __len__ "
                    "and __getitem__; only train may be iterable"
                )

    def train_dataloader(self) -> ResumableLoader | IterationLoader:
        """Return the training batches, all of them full.

        They start at the position of the checkpoint or of this run's last loader.
        """
        share = self._share(self.batch_size)
        loader: ResumableLoader | IterationLoader
        if has_length(self.train):
            order = item_order(len(self.train), self.shuffle, self.seed)
            loader = ResumableLoader(
                ItemStream(self.train, order, share),
                self._make_batch,
                self.num_workers,
                self._identity(),
                self._micro_batches,
                self._n_ahead,
            )
        else:
            self._check_iteration()
            loader = IterationLoader(self.train, self._make_batch, share, self._micro_batches)
        self._continue_with(loader)
        return loader

    def val_dataloader(self) -> Any:
        """Return the validation items in order. No loader without a dataset."""
        return self._evaluation_loader(self.val) if self.val is not None else []

    def test_dataloader(self) -> Loader:
        """Return the test items in order. Raise UserError without a dataset."""
        if self.test is None:
            raise UserError("TokenData has no test split: give it a dataset `test`")
        return self._evaluation_loader(self.test)

    def _evaluation_loader(self, dataset: Any) -> Loader:
        stream = ItemEvaluation(dataset, self._share(self.val_batch_size))
        return Loader(stream, self._make_batch, n_ahead=self._n_ahead)

    def _check_iteration(self) -> None:
        """Raise UserError for settings that an iterable dataset cannot have."""
        if self.num_workers:
            raise UserError(
                f"data.num_workers={self.num_workers} and an iterable TokenData.train, whose "
                "position only this process knows: set data.num_workers to 0"
            )
        if self.trainer is not None and self.trainer.max_steps <= 0:
            raise UserError(
                "an iterable TokenData.train has no number of batches: set trainer.max_steps"
            )

    def _identity(self) -> dict[str, Any]:
        """Return what a position in the order depends on, by the words of an error."""
        return {
            "TokenData.train (its length)": len(self.train),
            "--data.fingerprint": self.fingerprint,
            "--data.seed": self.seed,
            "--data.shuffle": self.shuffle,
        }

    def _make_batch(self, blocks: TokenBlocks) -> Batch:
        """Make the batch of a loader, page-locked if a GPU reads it."""
        end_of_document = NO_TOKEN if self.end_of_document is None else self.end_of_document
        batch = batch_from_blocks(blocks.tokens, end_of_document, n_targets=blocks.n_targets)
        return batch.pin_memory() if self._is_on_gpu else batch


def has_length(dataset: Any) -> bool:
    """Whether a dataset gives each item by its number."""
    is_iterable = isinstance(dataset, IterableDataset)  # which inherits `__getitem__`
    return not is_iterable and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
