"""The DataModule of datasets in Python: torch's `Dataset`, a list, or an iteration of tokens."""

from typing import Any

from torch.utils.data import Dataset, IterableDataset

from anlit.config.value_checks import check_ranges
from anlit.data.batch import Batch, batch_from_blocks
from anlit.data.item_streams import (
    ItemEvaluation,
    ItemStream,
    IterationLoader,
    item_order,
)
from anlit.data.loaders import Loader, ResumableLoader
from anlit.data.resumable_data import ResumableData
from anlit.data.streams import TokenBlocks
from anlit.errors import UserError

NO_TOKEN = -1
"""The end-of-document token of rows that are one document each."""


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
        val: dataset of validation, with a length; none for no validation.
        test: dataset of the test, with a length.
        vocab_size: number of tokens in the vocabulary.
        batch_size: sequences per device and micro-batch.
        num_workers: loader processes per device for training on a dataset with a length.
        shuffle: whether to shuffle a dataset with a length.
        seed: seed of the order.
        val_batch_size: sequences per device and validation batch; by default batch_size.
        end_of_document: the token that ends a document inside of an item; by default an item is one
            document.
        bytes_per_token: bytes of the validation text per token, for bits per byte.
        tokenizer: a tokenizer of the tokenizers library, a fast one of transformers, or the path of
            a tokenizer.json.
        fingerprint: a text that names data and version, by which `anlit compare` knows them.
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
        """Check the datasets; UserError if one is empty, or lacks a length that it needs."""
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
                ItemStream(self.train, order, share, "TokenData.train"),
                self._make_batch,
                self.num_workers,
                self._identity(),
                self._micro_batches,
                self._n_ahead,
            )
        else:
            self._check_iteration()
            name = "TokenData.train"
            loader = IterationLoader(self.train, self._make_batch, share, name, self._micro_batches)
        self._continue_with(loader)
        return loader

    def val_dataloader(self) -> Any:
        """Return the validation items in order; no loader without a dataset."""
        return self._evaluation_loader(self.val) if self.val is not None else []

    def test_dataloader(self) -> Loader:
        """Return the test items in order; UserError without a dataset."""
        if self.test is None:
            raise UserError("TokenData has no test split: give it a dataset `test`")
        return self._evaluation_loader(self.test)

    def _evaluation_loader(self, dataset: Any) -> Loader:
        stream = ItemEvaluation(dataset, self._share(self.val_batch_size), "TokenData")
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
