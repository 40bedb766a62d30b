"""The DataModule that every corpus is read through."""

from typing import Any

import lightning as L
from tokenizers import Tokenizer

from anlit.data import shards
from anlit.data.batch import BlockCollate
from anlit.data.loader import ResumableLoader, open_split
from anlit.data.tokenizer import as_plain_text
from anlit.errors import UserError

VOCABULARY_PADDING = 128  # a model's vocabulary may be rounded up to a multiple of this, for faster kernels


class TokenShards(L.LightningDataModule):
    """Batches from a folder of token shards that is already prepared.

    It knows nothing about how the shards came to be; a corpus is a subclass whose `prepare_data` makes
    them. The training stream is consecutive blocks of `context_length` + 1 tokens that do not overlap,
    in an order that `seed` and the epoch decide; its position is part of every checkpoint.

    Args:
        path: folder (or s3://, gs:// address) with train/, val/, tokenizer.json and manifest.json.
        batch_size: sequences per device and micro-batch.
        context_length: tokens per sequence; by default the model's.
        num_workers: loader processes per device; the order of the data depends on it.
        shuffle: whether to shuffle the training blocks; validation never is.
        seed: seed of the data order.
        score_first_token: whether the first token of a document that follows another in the same
            sequence counts in the loss.
        val_batch_size: sequences per device and validation batch; by default batch_size.
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
    ) -> None:
        super().__init__()
        self.path = path.rstrip("/")
        self.batch_size = batch_size
        self.context_length = context_length
        self.num_workers = num_workers
        self.shuffle = shuffle
        self.seed = seed
        self.score_first_token = score_first_token
        self.val_batch_size = val_batch_size or batch_size
        self._manifest: dict[str, Any] | None = None

    @property
    def manifest(self) -> dict[str, Any]:
        """What manifest.json says; read once."""
        if self._manifest is None:
            self._manifest = shards.read_manifest(self.path)
        return self._manifest

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data in a run's record."""
        keys = ("corpus", "content_sha256", "tokenizer_sha256", "vocab_size", "documents", "bytes", "tokens")
        found = {key: self.manifest[key] for key in keys if key in self.manifest}
        return {"path": self.path, **found, **{split: self.manifest[split] for split in shards.SPLITS}}

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the shards' vocabulary, with the special ones."""
        return self.manifest["vocab_size"]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the shards."""
        return as_plain_text(Tokenizer.from_str(shards.read_text(f"{self.path}/{shards.TOKENIZER}")))

    def bytes_per_token(self, split: str = "val") -> float:
        """Bytes of text per token, end-of-document tokens counted: turns nats per token into bits per byte."""
        return self.manifest[split]["bytes"] / self.manifest[split]["tokens"]

    def setup(self, stage: str | None = None) -> None:
        """Check the shards against the model and the loader's settings.

        Raises:
            UserError: the folder is missing or damaged, or context length, batch size or vocabulary do not fit.
        """
        model = self.trainer.lightning_module if self.trainer is not None else None
        if self.context_length is None:
            self.context_length = getattr(model, "context_length", None)
        if self.context_length is None:
            raise UserError("The data have no context length and the model tells none: set --data.context_length.")
        shards.check_chunks(self.path, self.manifest)
        self._check_vocabulary(getattr(model, "vocab_size", None))
        if stage in (None, "fit"):
            self._check_enough("train", self.batch_size, workers=max(1, self.num_workers))
        self._check_enough("val", self.val_batch_size if self._world_size > 1 else 1, workers=1)

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    def _check_vocabulary(self, model_size: int | None) -> None:
        padded = -(-self.vocab_size // VOCABULARY_PADDING) * VOCABULARY_PADDING
        if model_size is not None and not self.vocab_size <= model_size <= padded:
            raise UserError(
                f"The model has a vocabulary of {model_size} tokens and the shards in {self.path} have "
                f"{self.vocab_size}: set --model.vocab_size {self.vocab_size} (or up to {padded})."
            )

    def _check_enough(self, split: str, batch_size: int, workers: int) -> None:
        assert self.context_length is not None
        block_size = self.context_length + 1
        blocks = shards.blocks_in(self.path, split, block_size)
        if blocks == 0:
            longest = max(chunk["dim"] for chunk in shards.chunks_of(self.path, split))
            raise UserError(
                f"context_length {self.context_length} is longer than the chunks of {self.path}/{split}, "
                f"whose longest has {longest:,} tokens: set --model.context_length to {longest - 1} or less."
            )
        needed = batch_size * workers * self._world_size
        if blocks < needed:
            name = "val_batch_size" if split == "val" else "batch_size"
            raise UserError(
                f"{name} {batch_size} with {workers} worker(s) on each of {self._world_size} device(s) needs "
                f"{needed:,} sequences and {self.path}/{split} has {blocks:,} of {self.context_length} tokens: "
                f"set a smaller --data.{name}, a smaller --data.num_workers or a shorter context_length."
            )

    def train_dataloader(self) -> ResumableLoader:
        """Shuffled blocks; every batch is full."""
        loader = self._loader("train", self.batch_size, self.shuffle, drop_last=True)
        if self.trainer is not None:
            # After a resume at the end of an epoch the Trainer restores its own epoch but no loader's.
            loader.current_epoch = self.trainer.current_epoch
        return loader

    def val_dataloader(self) -> ResumableLoader:
        """All blocks in their order on one device; on several, those that give each as many batches."""
        return self._loader("val", self.val_batch_size, shuffle=False, drop_last=None)

    def test_dataloader(self) -> ResumableLoader:
        """The validation split."""
        return self.val_dataloader()

    def predict_dataloader(self) -> ResumableLoader:
        """The validation split."""
        return self.val_dataloader()

    def _loader(self, split: str, batch_size: int, shuffle: bool, drop_last: bool | None) -> ResumableLoader:
        assert self.context_length is not None, "setup() comes first"
        dataset = open_split(self.path, split, self.context_length + 1, shuffle, self.seed, drop_last)
        collate = BlockCollate(
            self.manifest["end_of_document"],
            self.manifest.get("document_token_at", "end"),
            self.score_first_token,
        )
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        loader = ResumableLoader(
            dataset,
            batch_size=batch_size,
            num_workers=self.num_workers,
            collate_fn=collate,
            pin_memory=on_gpu,
        )
        loader.content = self.manifest["content_sha256"]
        return loader
