"""The DataModule that reads every corpus."""

import logging
import os
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from anlit.config.value_checks import check_ranges
from anlit.data import checks
from anlit.data.batch import Batch, batch_from_blocks
from anlit.data.loaders import Loader, ResumableData, ResumableLoader
from anlit.data.order import training_order
from anlit.data.storage.manifest import (
    TOKENIZER,
    n_changed_documents,
    read_manifest,
    read_tokenizer,
)
from anlit.data.storage.shards import TokenArray, check_chunks, read_token_arrays
from anlit.data.storage.store import OpenFiles, TokenStore
from anlit.data.streams import BlockStream, EvaluationStream, TokenBlocks, TokenStream
from anlit.data.tokenizer import parse_tokenizer
from anlit.errors import UserError

FINGERPRINT_KEYS = (
    "corpus",
    "content_sha256",
    "documents",
    "bytes",
    "tokens",
    "tokenizer_sha256",
    "vocab_size",
    "end_of_document",
    "document_token_at",
)
"""Keys of the manifest that go into the record of a run."""
_log = logging.getLogger(__name__)


class TokenShards(ResumableData):
    """Batches from a prepared folder of token shards.

    A corpus is a subclass that makes the shards in `prepare_data`. A split is a long array of
    tokens, or an array for each subset, cut into blocks of `context_length` targets. A target is a
    token to predict. Every block comes once before any comes again. Training leaves out the end of
    an array, which is too short for a block. `seed` alone decides the order, whatever the number of
    workers and devices. Every checkpoint has the position in that order.

    Args:
        path: folder (or s3://, gs://, hf:// address) with train/, val/, tokenizer.json and
            manifest.json.
        batch_size: sequences per device and micro-batch.
        context_length: tokens per sequence. By default the model's.
        num_workers: loader processes per device for training. Evaluation needs none.
        shuffle: whether to shuffle the training blocks. Otherwise they come in the order of the
            files. Validation is never shuffled.
        seed: seed of the data order.
        score_first_token: whether a document's first token counts in the loss if another document
            precedes it.
        val_batch_size: sequences per device and validation batch. By default batch_size.
        weights: how often to draw from each subset of the corpus, or each folder of a `Mixture`, as
            {name: weight}. A name that is not listed is left out. By default nothing is weighted,
            and every block comes once.
        val_tokens: number of targets to validate on, tokens 1 … val_tokens of the split. By default
            all.
        val_blocks: number of blocks of `val_context_length` to validate on, evenly spread over
            these targets. By default all. For a short validation it is better than `val_tokens`.
            The beginning of a split may be a few long documents, on which runs differ far more.
        val_context_length: tokens per sequence of validation and test. By default context_length.
        context_schedule: optimizer step → tokens per training sequence from that step on, as
            {0: 1024, 5000: 2048}. The last length must be context_length, and each length must
            divide it: a batch keeps its tokens, cut into more sequences. By default all are as
            long as context_length.
        cache_gb: size of the cache for remote shards of all runs, in 10⁹ bytes, under
            LITDATA_CACHE_DIR (by default ~/.lightning/chunks).
    """

    def __init__(
        self,
        path: str,
        batch_size: int = 8,
        context_length: int | None = None,
        num_workers: int = 0,
        shuffle: bool = True,
        seed: int = 42,
        score_first_token: bool = True,
        val_batch_size: int | None = None,
        weights: dict[str, float] | None = None,
        val_tokens: int | None = None,
        val_blocks: int | None = None,
        val_context_length: int | None = None,
        context_schedule: dict[int, int] | None = None,
        cache_gb: float = 100.0,
    ) -> None:
        check_ranges("data", locals())  # first: `locals()` must be the arguments alone
        super().__init__()
        self.path = os.path.expanduser(path.rstrip("/"))
        self.batch_size = batch_size
        self.context_length = context_length
        self.num_workers = num_workers
        self.shuffle = shuffle
        self.seed = seed
        self.score_first_token = score_first_token
        self.val_batch_size = val_batch_size or batch_size
        self.weights = weights
        self.val_tokens = val_tokens
        self.val_blocks = val_blocks
        self.val_context_length = val_context_length
        self.context_schedule = context_schedule
        self.cache_gb = cache_gb

    @property
    def folders(self) -> list[str]:
        """The paths of all folders. A mixture has several."""
        return [self.path]

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The content of manifest.json. Raise UserError if it is missing or damaged."""
        return read_manifest(self.path)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The identity of the data in a run's record."""
        fingerprint = {"path": self.path}
        for key in (*FINGERPRINT_KEYS, *self.manifest["splits"]):
            if key in self.manifest:
                fingerprint[key] = self.manifest[key]
        return fingerprint

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary, with the special tokens."""
        return self.manifest["vocab_size"]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens. Raise UserError if it is missing or differs."""
        return parse_tokenizer(self.tokenizer_content, f"{self.folders[0]}/{TOKENIZER}")

    @property
    def tokenizer_content(self) -> bytes:
        """The content of tokenizer.json. Errors as in `tokenizer`."""
        return read_tokenizer(self.folders[0], self.manifest)

    def bytes_per_token(self, split: str = "val") -> float | None:
        """Return the bytes of text per token, which turn nats per token into bits per byte.

        They are of the whole split, also if `val_blocks` samples it. A split that the folder lacks
        has the bytes per token of val. None in four cases:

        - The text is not known.
        - Only the beginning of the split is read. Its tokens may be longer or shorter.
        - A document does not come back from its tokens. The loss then belongs to another text.
        - The first tokens of documents do not count (`score_first_token`). The loss leaves them
          out, and the bytes would have them.
        """
        if split not in self.manifest:
            split = "val"
        counts = self.manifest[split]
        if not self.score_first_token or n_changed_documents(self.manifest, split):
            return None
        n_read, n_available = self._count_batches(split)
        reads_val_tokens = split == "val" and 0 < (self.val_tokens or 0) < self.n_targets(split)
        if n_read < n_available or reads_val_tokens or not counts["bytes"]:
            return None
        return counts["bytes"] / counts["tokens"]

    @cached_property
    def token_arrays(self) -> dict[str, dict[str, list[TokenArray]]]:
        """The token arrays of each split, by the names that have weights.

        Raises UserError for a damaged index.
        """
        arrays_by_split = {}
        for split, arrays in read_token_arrays(self.path, self.manifest).items():
            arrays_by_split[split] = {array.name: [array] for array in arrays}
        return arrays_by_split

    def arrays_of_split(self, split: str) -> list[TokenArray]:
        """Return the token arrays of a split, in order."""
        return list(chain.from_iterable(self.token_arrays[split].values()))

    def n_targets(self, split: str) -> int:
        """Return the number of tokens to predict: all tokens of each array but the first."""
        return sum(max(0, array.n_tokens - 1) for array in self.arrays_of_split(split))

    def stores(self, split: str) -> list[TokenStore]:
        """Return readers of the token arrays of a split."""
        open_files = OpenFiles()
        cache_bytes = int(self.cache_gb * 1e9)
        arrays = self.arrays_of_split(split)
        return [TokenStore(array, cache_bytes, open_files) for array in arrays]

    @property
    def counts_every_target(self) -> bool:
        """Whether every target of a training batch counts, so that all batches weigh the same."""
        return self.score_first_token

    def check_settings(self, model_length: int | None, trains: bool) -> None:
        """Raise UserError for settings that no shards fit, before they are prepared.

        Without a context length of its own this object takes `model_length`.
        """
        length = self._set_context_length(model_length, trains)
        checks.check_context_schedule(self.context_schedule, length)
        overfit_batches = getattr(self.trainer, "overfit_batches", 0)
        if trains and overfit_batches:
            raise UserError(
                f"trainer.overfit_batches={overfit_batches} cannot repeat batches of an endless "
                "stream: leave it out, and overfit a corpus of a few texts"
            )

    def setup(self, stage: str | None = None) -> None:
        """Check the shards and the settings.

        Raises UserError if the folder is missing or damaged, or does not fit a setting or the
        model.
        """
        self.teardown("fit")  # forgets the position of an earlier run with this object
        model = self.trainer.lightning_module if self.trainer is not None else None
        trains = stage in (None, "fit")
        self.check_settings(getattr(model, "context_length", None), trains)
        self._check_files()
        owner = f"the shards in {self.path} have"
        checks.check_vocabulary(getattr(model, "vocab_size", None), self.vocab_size, owner)
        checks.check_weights(self.weights, list(self.token_arrays["train"]), self.path)
        if trains:
            self._check_training()
        self._check_validation()
        trainer: Any = self.trainer
        split = "test" if stage == "test" else "val"
        if trainer is not None and not trainer.fast_dev_run and split in self.manifest["splits"]:
            self._warn_of_cut(split)

    def _set_context_length(self, model_length: int | None, trains: bool) -> int:
        """Take the model's context length by default. Training needs the same length in both."""
        if self.context_length is None:
            self.context_length = model_length
        if self.context_length is None:
            raise UserError(
                "the data have no context length and the model has none: set --data.context_length"
            )
        if trains and model_length not in (None, self.context_length):
            raise UserError(
                f"data.context_length={self.context_length} is not "
                f"model.context_length={model_length}: leave it out, and set the model's to the "
                "length of training"
            )
        return self.context_length

    def _check_files(self) -> None:
        """Raise UserError for a damaged tokenizer.json, index or chunk.

        One device of each machine looks at the chunks, which may be on the machine's own disk. A
        thousand devices that look at 100,000 chunks would stop a file server.
        """
        for folder in self.folders:
            if Path(folder, TOKENIZER).is_file():
                read_tokenizer(folder, self.manifest)
        for split in self.manifest["splits"]:
            for array in self.arrays_of_split(split):
                if self._is_first_of_machine:
                    check_chunks(array)

    def _check_training(self) -> None:
        if self.weights is None:
            arrays_by_name = {"": self.arrays_of_split("train")}  # all as one
        else:
            arrays_by_name = {}
            for name, weight in self.weights.items():
                if weight:
                    arrays_by_name[name] = self.token_arrays["train"][name]
        n_devices = self._share(self.batch_size).world_size
        checks.check_enough_to_train(
            arrays_by_name, self.batch_size, n_devices, self._length, self.path
        )
        self._training_stream()  # refuses weights that are too small

    def _check_validation(self) -> None:
        n_changed = n_changed_documents(self.manifest, "val")
        if n_changed and self._is_first_device:
            n_documents = self.manifest["val"]["documents"]
            _log.info(
                f"{self.path}/val: the tokenizer gives back {n_changed:,} of {n_documents:,} "
                "documents as another text, so no bits per byte is reported."
            )
        n_targets = self.n_targets("val")
        if n_targets == 0:
            raise UserError(
                f"{self.path}/val has no token to predict: prepare it again with more text held out"
            )
        stream: Any = self._evaluation_stream("val")
        is_short = n_targets < (self.val_tokens or 0) or stream.available < (self.val_blocks or 0)
        if is_short and self._is_first_device:
            _log.info(
                f"{self.path}/val has only {n_targets:,} targets, and {stream.available:,} blocks "
                f"of {stream.length} tokens to choose from: --data.val_tokens or --data.val_blocks "
                "asks for more."
            )

    def _warn_of_cut(self, split: str) -> None:
        """Warn if the Trainer's limit leaves only the beginning of a split. Give the fix."""
        n_read, n_available = self._count_batches(split)
        share = self._share(self.val_batch_size)
        if not 0 < n_read < n_available or share.rank != 0:
            return
        fix = "leave the limit out"
        if split == "val":
            fix = f"set data.val_blocks to {n_read * share.sequences} and {fix}"
        limit = getattr(self.trainer, f"limit_{split}_batches")
        _log.warning(
            f"trainer.limit_{split}_batches={limit} reads the first {n_read:,} of {n_available:,} "
            f"batches, the beginning of {self.path}/{split} and no sample of it: {fix}."
        )

    def _count_batches(self, split: str) -> tuple[int, int]:
        """Return how many batches of an evaluation split the Trainer reads, and how many exist."""
        n_available = self._evaluation_stream(split).n_batches or 0
        limit = getattr(self.trainer, f"limit_{split}_batches", 1.0)
        max_batches = int(n_available * limit) if isinstance(limit, float) else limit
        return min(n_available, max_batches), n_available

    def evaluation_size(self, split: str) -> tuple[int, int]:
        """Return the tokens of an evaluation split that each device reads, and of a sequence.

        The first number is 0 without the split, which `test_dataloader` refuses.
        """
        length = self.val_context_length or self._length
        if split not in self.token_arrays:
            return 0, length
        n_batches, _ = self._count_batches(split)
        return n_batches * self.val_batch_size * length, length

    def train_dataloader(self) -> ResumableLoader:
        """Return the training batches, all of them full.

        They start at the position of the checkpoint or of this run's last loader. Raises UserError
        if the checkpoint's position belongs to other data or another order.
        """
        loader = ResumableLoader(
            self._training_stream(),
            self._make_batch,
            self.num_workers,
            self._identity(),
            self._micro_batches,
            self._n_ahead,
        )
        self._continue_with(loader)
        return loader

    def val_dataloader(self) -> Loader:
        """Return the validation split in order, as far as `val_tokens` and `val_blocks` select."""
        return Loader(self._evaluation_stream("val"), self._make_batch, n_ahead=self._n_ahead)

    def test_dataloader(self) -> Loader:
        """Return the test split.

        Raises UserError if the corpus has none: a validation loss is not a test loss.
        """
        if "test" not in self.manifest["splits"]:
            raise UserError(
                f"{self.path} has no test split: use `anlit validate` for the loss on its "
                "validation split"
            )
        return Loader(self._evaluation_stream("test"), self._make_batch, n_ahead=self._n_ahead)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Cut a training batch to the length that `context_schedule` has for the current step."""
        if not self.context_schedule or self.trainer is None or not self.trainer.training:
            return batch
        current_step = self.trainer.global_step
        last_change = max(step for step in self.context_schedule if step <= current_step)
        return batch.split(self.context_schedule[last_change])

    @property
    def _length(self) -> int:
        assert self.context_length is not None, "setup() comes first"
        return self.context_length

    def _identity(self) -> dict[str, Any]:
        """Return the settings that a position in the training stream depends on.

        A checkpoint with other values is refused. The keys are words of that error.
        """
        return {
            "--data.path (the texts in it)": self.manifest["content_sha256"],
            "--data.seed": self.seed,
            "--data.shuffle": self.shuffle,
            "--data.weights": self.weights,
            "--model.context_length": self.context_length,
        }

    def _training_stream(self) -> BlockStream:
        chunk_tokens = {}  # by subset: for each array, the number of tokens in each chunk
        for name, arrays in self.token_arrays["train"].items():
            chunk_tokens[name] = [array.chunk_tokens for array in arrays]
        order = training_order(chunk_tokens, self._length, self.weights, self.shuffle, self.seed)
        return TokenStream(self.stores("train"), order, self._length, self._share(self.batch_size))

    def _evaluation_stream(self, split: str) -> BlockStream:
        is_val = split == "val"
        return EvaluationStream(
            self.stores(split),
            self.val_context_length or self._length,
            self._share(self.val_batch_size),
            self.manifest["end_of_document"],
            self.val_tokens if is_val else None,
            self.val_blocks if is_val else None,
            whole_batches=self._is_on_gpu,  # code compiled for a GPU needs a fixed number of rows
        )

    def _make_batch(self, blocks: TokenBlocks) -> Batch:
        """Make the batch of a loader, page-locked if a GPU reads it."""
        batch = batch_from_blocks(
            blocks.tokens,
            self.manifest["end_of_document"],
            self.manifest["document_token_at"],
            self.score_first_token,
            blocks.n_targets,
        )
        return batch.pin_memory() if self._is_on_gpu else batch
