"""The DataModule that every corpus is read through."""

import logging
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
from tokenizers import Tokenizer

from anlit.config.schema import check_ranges
from anlit.data import checks
from anlit.data.batch import Batch, batch_from_blocks
from anlit.data.order import training_order
from anlit.data.storage.manifest import TOKENIZER, n_changed, read_manifest, read_tokenizer
from anlit.data.storage.shards import Source, check_chunks, read_sources
from anlit.data.storage.store import OpenFiles, TokenStore
from anlit.data.streams import (
    Blocks,
    BlockStream,
    EvaluationStream,
    Loader,
    ResumableLoader,
    Share,
    TokenStream,
)
from anlit.data.tokenizer import parse_tokenizer
from anlit.errors import UserError

IDENTITY = (
    "corpus", "content_sha256", "documents", "bytes", "tokens", "tokenizer_sha256", "vocab_size", "end_of_document",
    "document_token_at",
)  # fmt: skip
BATCHES_AHEAD = 2
"""Batches that wait in page-locked memory for a GPU."""
_log = logging.getLogger(__name__)


class TokenShards(L.LightningDataModule):
    """Batches from a prepared folder of token shards.

    A corpus is a subclass whose `prepare_data` makes the shards. A split is one long array of tokens, cut into blocks
    of `context_length` targets. Every block comes once before any comes again; training leaves out only the rest at
    the array's end, which is too short for a block. `seed` alone decides the order, whatever the number of workers and
    devices. Every checkpoint has the place in that order.

    Args:
        path: folder (or s3://, gs://, hf:// address) with train/, val/, tokenizer.json and manifest.json.
        batch_size: sequences per device and micro-batch.
        context_length: tokens per sequence; by default the model's.
        num_workers: loader processes per device for training; evaluation reads in the process itself.
        shuffle: whether to shuffle the training blocks; otherwise they come in the order of the files. Validation is
            never shuffled.
        seed: seed of the data order.
        score_first_token: whether a document's first token counts in the loss where another document precedes it.
        val_batch_size: sequences per device and validation batch; by default batch_size.
        weights: how often to draw from each subset of the corpus, or each folder of a `Mixture`, as {name: weight}; a
            name that is not listed is left out. By default all are one, and every block comes once.
        val_tokens: number of targets to validate on, tokens 1 … val_tokens of the split; by default all.
        val_blocks: number of blocks of `val_context_length` to validate on, evenly spread over these targets: the first
            blocks alone may be a few long documents, on which runs differ by far more. By default all.
        val_context_length: tokens per sequence of validation and test; by default context_length.
        context_schedule: optimizer step → tokens per training sequence from then on, as {0: 1024, 5000: 2048}. Each
            length divides the last, context_length: a batch keeps its tokens, cut into more sequences.
        cache_gb: size of the cache for remote shards of all runs, in 10⁹ bytes, under LITDATA_CACHE_DIR (by default
            ~/.lightning/chunks).
    """

    def __init__(
        self, path: str, batch_size: int = 8, context_length: int | None = None, num_workers: int = 0,
        shuffle: bool = True, seed: int = 42, score_first_token: bool = True, val_batch_size: int | None = None,
        weights: dict[str, float] | None = None, val_tokens: int | None = None, val_blocks: int | None = None,
        val_context_length: int | None = None, context_schedule: dict[int, int] | None = None, cache_gb: float = 100.0,
    ) -> None:  # fmt: skip
        check_ranges("data", locals())
        super().__init__()
        self.path, self.batch_size, self.context_length = (
            os.path.expanduser(path.rstrip("/")),
            batch_size,
            context_length,
        )
        self.num_workers, self.shuffle, self.seed = num_workers, shuffle, seed
        self.score_first_token, self.val_batch_size = (
            score_first_token,
            val_batch_size or batch_size,
        )
        self.weights, self.val_tokens, self.val_blocks = weights, val_tokens, val_blocks
        self.val_context_length, self.context_schedule, self.cache_gb = (
            val_context_length,
            context_schedule,
            cache_gb,
        )
        self._loader: ResumableLoader | None = None
        self._restored: dict[str, Any] = {}

    @property
    def folders(self) -> list[str]:
        """The paths of all folders; a mixture has several."""
        return [self.path]

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The content of manifest.json; UserError if it is missing or damaged."""
        return read_manifest(self.path)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data in a run's record."""
        known = [key for key in (*IDENTITY, *self.manifest["splits"]) if key in self.manifest]
        return {"path": self.path, **{key: self.manifest[key] for key in known}}

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary, with the special ones."""
        return self.manifest["vocab_size"]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens; UserError if the folder has none or another one."""
        return parse_tokenizer(self.tokenizer_content, f"{self.folders[0]}/{TOKENIZER}")

    @property
    def tokenizer_content(self) -> bytes:
        """The content of tokenizer.json; errors are those of `tokenizer`."""
        return read_tokenizer(self.folders[0], self.manifest)

    def bytes_per_token(self, split: str = "val") -> float | None:
        """Bytes of text per token, which turns nats per token into bits per byte; None where the text is not known, or
        only the beginning of the split is read, whose tokens may be longer or shorter. None also where a document does
        not come back from its tokens: the loss is that of another text.
        """
        if split not in self.manifest:
            split = "val"
        counts = self.manifest[split]
        if n_changed(self.manifest, split):
            return None
        read, there = self._batches(split)
        if read < there or (split == "val" and 0 < (self.val_tokens or 0) < self.n_targets(split)):
            return None
        return counts["bytes"] / counts["tokens"] if counts["bytes"] else None

    @cached_property
    def sources(self) -> dict[str, dict[str, list[Source]]]:
        """The token arrays of each split, by the names that weights are given for; UserError for a damaged index."""
        return {
            split: {source.name: [source] for source in sources}
            for split, sources in read_sources(self.path, self.manifest).items()
        }

    def all_sources(self, split: str) -> list[Source]:
        """The token arrays of a split, in order."""
        return [source for group in self.sources[split].values() for source in group]

    def n_targets(self, split: str) -> int:
        """Tokens to predict: all of each source but its first."""
        return sum(max(0, source.n_tokens - 1) for source in self.all_sources(split))

    def stores(self, split: str) -> list[TokenStore]:
        """The token arrays of a split, to be read from."""
        open_files = OpenFiles()
        cache_bytes = int(self.cache_gb * 1e9)
        return [TokenStore(source, cache_bytes, open_files) for source in self.all_sources(split)]

    @property
    def counts_every_target(self) -> bool:
        """Whether every target of a training batch counts in the loss, so that all batches count equally many."""
        return self.score_first_token

    def setup(self, stage: str | None = None) -> None:
        """Check the shards: UserError if the folder is missing or damaged, or does not fit a setting or the model."""
        self.teardown("fit")
        model = self.trainer.lightning_module if self.trainer is not None else None
        own = getattr(model, "context_length", None)
        if self.context_length is None:
            self.context_length = own
        if stage in (None, "fit") and own not in (
            None,
            self.context_length,
        ):  # the length of training, for all
            differs = f"data.context_length={self.context_length} is not model.context_length={own}"
            raise UserError(
                f"{differs}: leave it out, and set the model's to the length of training"
            )
        if self.context_length is None:
            raise UserError(
                "The data have no context length and the model tells none: set --data.context_length."
            )
        for folder in self.folders:
            if Path(folder, TOKENIZER).is_file():
                read_tokenizer(folder, self.manifest)
        for split in self.manifest["splits"]:
            for source in self.all_sources(split):
                check_chunks(source)
        checks.check_vocabulary(getattr(model, "vocab_size", None), self.vocab_size, self.path)
        checks.check_context_schedule(self.context_schedule, self.context_length)
        checks.check_weights(self.weights, list(self.sources["train"]), self.path)
        if stage in (None, "fit"):
            self._check_training()
        self._check_validation()
        trainer: Any = self.trainer
        split = "test" if stage == "test" else "val"
        if trainer is not None and not trainer.fast_dev_run and split in self.manifest["splits"]:
            self._warn_of_cut(split)

    def _check_training(self) -> None:
        if repeated := getattr(self.trainer, "overfit_batches", 0):
            fix = "leave it out, and overfit a corpus of a few texts"
            raise UserError(
                f"trainer.overfit_batches={repeated} cannot repeat batches of an endless stream: {fix}"
            )
        if (limit := getattr(self.trainer, "limit_train_batches", 1.0)) != 1.0 and self._share(
            1
        ).rank == 0:
            _log.info(
                f"trainer.limit_train_batches={limit} ends epochs early; the data go on, no batch is repeated."
            )
        drawn = {"": self.all_sources("train")}
        if self.weights is not None:
            drawn = {
                name: self.sources["train"][name] for name, weight in self.weights.items() if weight
            }
        devices = self._share(self.batch_size).world_size
        checks.check_enough_to_train(drawn, self.batch_size, devices, self._length, self.path)
        self._training_stream()  # refuses weights that are too small

    def _check_validation(self) -> None:
        if (n_documents := n_changed(self.manifest, "val")) and self._share(1).rank == 0:
            _log.info(
                f"{self.path}/val: the tokenizer gives back {n_documents:,} of "
                f"{self.manifest['val']['documents']:,} documents as another text, so no bits per byte is reported."
            )
        if (n_targets := self.n_targets("val")) == 0:
            raise UserError(
                f"{self.path}/val has no token to predict: prepare it again with more text held out."
            )
        stream: Any = self._evaluation_stream("val")
        within = (
            f" in its first {self.val_tokens:,}"
            if self.val_tokens and self.val_tokens < n_targets
            else ""
        )
        blocks = f"{stream.available:,} blocks of {stream.length} tokens{within}"
        for there, wanted, what, option in (
            (n_targets, self.val_tokens, f"{n_targets:,} targets", "val_tokens"),
            (stream.available, self.val_blocks, blocks, "val_blocks"),
        ):
            if there < (wanted or 0) and stream.share.rank == 0:
                _log.info(
                    f"{self.path}/val has only {what}, not the {wanted:,} of --data.{option}."
                )

    def _warn_of_cut(self, split: str) -> None:
        """Say that the Trainer's limit leaves the beginning of a split, and what samples or reads all of it."""
        (read, there), share = self._batches(split), self._share(self.val_batch_size)
        limit = getattr(self.trainer, f"limit_{split}_batches")
        if 0 < read < there and share.rank == 0:
            what = f"the first {read:,} of {there:,} batches, the beginning of {self.path}/{split} and no sample of it"
            sample = (
                f"set data.val_blocks to {read * share.sequences} and " if split == "val" else ""
            )
            _log.warning(
                f"trainer.limit_{split}_batches={limit} reads {what}: {sample}leave the limit out."
            )

    def _batches(self, split: str) -> tuple[int, int]:
        """How many batches of a validation or test split the Trainer reads, and how many there are."""
        there = self._evaluation_stream(split).n_batches or 0
        limit = getattr(self.trainer, f"limit_{split}_batches", 1.0)
        return min(there, int(there * limit) if isinstance(limit, float) else limit), there

    def size_of_evaluation(self, split: str) -> tuple[int, int]:
        """Tokens of a validation or test split that each device reads, and tokens of its sequences.

        None without the split, which `test_dataloader` refuses.
        """
        length = self.val_context_length or self._length
        if split not in self.sources:
            return 0, length
        n_batches, _ = self._batches(split)
        return n_batches * self.val_batch_size * length, length

    def teardown(self, stage: str) -> None:
        """End the training loader's workers; the next run begins at the stream's start."""
        if self._loader is not None:
            self._loader.close()
        self._loader, self._restored = None, {}

    def state_dict(self) -> dict[str, Any]:
        """The place in the training stream.

        Lightning saves the loader's state too, but restores that one only if nothing has asked for the loader before,
        as `Trainer.estimated_stepping_batches` does in `configure_optimizers`.
        """
        return self._loader.state_dict() if self._loader is not None else self._restored

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict
        if (
            self._loader is not None
        ):  # sharded strategies restore after the optimizers have asked for the loader
            self._loader.load_state_dict(state_dict)

    def train_dataloader(self) -> ResumableLoader:
        """The training batches, all of them full, from where the checkpoint or this run's last loader stopped.

        Raises UserError if the checkpoint's place is in other data, or in another order.
        """
        micro_batches = self.trainer.accumulate_grad_batches if self.trainer is not None else 1
        stream, identity = self._training_stream(), self._identity()
        loader = ResumableLoader(
            stream, self._make_batch, self.num_workers, identity, micro_batches, self._n_ahead
        )
        if place := self.state_dict():
            loader.load_state_dict(place)
        self._loader = loader
        return loader

    def val_dataloader(self) -> Loader:
        """The validation split in its order, all of it or what `val_tokens` and `val_blocks` take of it."""
        return Loader(self._evaluation_stream("val"), self._make_batch, n_ahead=self._n_ahead)

    def test_dataloader(self) -> Loader:
        """The test split; UserError if the corpus has none: its validation loss is no test loss."""
        if "test" not in self.manifest["splits"]:
            raise UserError(
                f"{self.path} has no test split: use `anlit validate` for the loss on its validation split"
            )
        return Loader(self._evaluation_stream("test"), self._make_batch, n_ahead=self._n_ahead)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Cut a training batch to the length that `context_schedule` gives for the current step."""
        if not self.context_schedule or self.trainer is None or not self.trainer.training:
            return batch
        begun = [step for step in self.context_schedule if step <= self.trainer.global_step]
        return batch.split(self.context_schedule[max(begun)])

    @property
    def _length(self) -> int:
        assert self.context_length is not None, "setup() comes first"
        return self.context_length

    def _identity(self) -> dict[str, Any]:
        """What a place in the training stream depends on."""
        return {
            "--data.path (the texts in it)": self.manifest["content_sha256"],
            "--data.seed": self.seed,
            "--data.shuffle": self.shuffle,
            "--data.weights": self.weights,
            "--model.context_length": self.context_length,
        }

    def _training_stream(self) -> BlockStream:
        tokens = {
            name: [[chunk.tokens for chunk in source.chunks] for source in group]
            for name, group in self.sources["train"].items()
        }
        order = training_order(tokens, self._length, self.weights, self.shuffle, self.seed)
        return TokenStream(self.stores("train"), order, self._length, self._share(self.batch_size))

    def _evaluation_stream(self, split: str) -> BlockStream:
        length, share = self.val_context_length or self._length, self._share(self.val_batch_size)
        part = (self.val_tokens, self.val_blocks) if split == "val" else (None, None)
        return EvaluationStream(
            self.stores(split), length, share, self.manifest["end_of_document"], *part,
            whole_batches=self._is_on_gpu,
        )  # fmt: skip

    def _share(self, batch_size: int) -> Share:
        # Not the Trainer's rank: devices that split one model between them get the same data.
        place = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return (
            Share(batch_size, place["rank"], place["num_replicas"]) if place else Share(batch_size)
        )

    def _make_batch(self, blocks: Blocks) -> Batch:
        """What a loader turns its blocks into; pinned where a GPU takes it."""
        end, token_at = self.manifest["end_of_document"], self.manifest["document_token_at"]
        batch = batch_from_blocks(
            blocks.tokens, end, token_at, self.score_first_token, blocks.n_targets
        )
        return batch.pin_memory() if self._is_on_gpu else batch

    @property
    def _is_on_gpu(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    @property
    def _n_ahead(self) -> int:
        """On a CPU the thread would take time from the cores that compute."""
        return BATCHES_AHEAD if self._is_on_gpu else 0
