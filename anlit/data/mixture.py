"""Several prepared folders as one corpus."""

import hashlib
import json
from typing import Any

from anlit.data.module import TokenShards
from anlit.data.storage import shards
from anlit.errors import UserError

MUST_AGREE = ("tokenizer_sha256", "vocab_size", "dtype", "end_of_document", "document_token_at")


class Mixture(TokenShards):
    """Prepared folders mixed in given proportions; all of them made with the same tokenizer.

    Validation goes through every folder's val split, one after the other, so each counts by its tokens.

    Args:
        paths: name → prepared folder (or s3://, gs://, hf:// address).
        batch_size: sequences per device and micro-batch.
        context_length: tokens per sequence; by default the model's.
        num_workers: loader processes per device for training.
        shuffle: whether to shuffle the training blocks; validation never is.
        seed: seed of the data order.
        score_first_token: whether the first token of a document that follows another in the same
            sequence counts in the loss.
        val_batch_size: sequences per device and validation batch; by default batch_size.
        weights: name → how often to draw from that folder; they need not sum to 1, and a folder that is not listed is
            left out. By default all folders are one, and every block comes once.
        val_tokens: see `TokenShards`.
        val_blocks: see `TokenShards`.
        val_context_length: see `TokenShards`.
        context_schedule: see `TokenShards`.
        cache_gb: see `TokenShards`.
    """

    def __init__(
        self,
        paths: dict[str, str],
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
        if not paths:
            raise UserError("--data.paths names no folder: give at least one as name: folder.")
        # In the order of their names, so that the order in a YAML file decides nothing.
        self.paths = {name: paths[name].rstrip("/") for name in sorted(paths)}
        super().__init__(
            " + ".join(self.paths.values()),
            batch_size,
            context_length,
            num_workers,
            shuffle,
            seed,
            score_first_token,
            val_batch_size,
            weights,
            val_tokens,
            val_blocks,
            val_context_length,
            context_schedule,
            cache_gb,
        )

    def _folders(self) -> list[str]:
        return list(self.paths.values())

    def _read_manifest(self) -> dict[str, Any]:
        """One manifest for all, with each folder's own under `parts`."""
        parts = {name: shards.read_manifest(path) for name, path in self.paths.items()}
        first, *others = parts
        for other in others:
            for key in MUST_AGREE:
                if parts[other][key] != parts[first][key]:
                    raise UserError(
                        f"{self.paths[first]} and {self.paths[other]} differ in {key} ({parts[first][key]} and "
                        f"{parts[other][key]}): mix only folders that were prepared with the same tokenizer."
                    )
        splits = [split for split in parts[first]["splits"] if all(split in part["splits"] for part in parts.values())]
        hashes = {name: part["content_sha256"] for name, part in parts.items()}
        return {
            **{key: parts[first][key] for key in MUST_AGREE},
            "corpus": " + ".join(part["corpus"] for part in parts.values()),
            "content_sha256": hashlib.sha256(json.dumps(hashes).encode()).hexdigest(),
            **_sum(list(parts.values()), ("documents", "bytes", "tokens")),
            "splits": splits,
            **{split: _sum([part[split] for part in parts.values()]) for split in splits},
            "parts": parts,
        }

    def _read_sources(self, split: str) -> dict[str, list[shards.Source]]:
        parts = self.manifest["parts"]
        return {name: shards.sources_of(path, parts[name], split) for name, path in self.paths.items()}

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data in a run's record: the whole, and the hash of each folder's content."""
        parts = {name: part["content_sha256"] for name, part in self.manifest["parts"].items()}
        return {**super().fingerprint, "parts": parts}


def _sum(
    counts: list[dict[str, Any]], keys: tuple[str, ...] = ("documents", "bytes", "tokens", "chunks")
) -> dict[str, Any]:
    """The counts of all folders together; None where one of them does not know it."""
    return {
        key: None if any(count[key] is None for count in counts) else sum(count[key] for count in counts)
        for key in keys
    }
