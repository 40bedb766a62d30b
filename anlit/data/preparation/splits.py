"""Which documents are trained on and which are held out: one small class for each corpus's own way."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from anlit.errors import UserError

TRAIN, VAL, TEST = "train", "val", "test"


class Splits:
    """Base: every document is trained on. A subclass changes the one method that its rule needs."""

    needs_counts = False
    """Whether `held_out` needs to know how many records every file has, before any is read."""
    first_tokens = 0
    """How many tokens at the very beginning are held out; the document that holds the last of them goes with them."""

    def of_file(self, name: str) -> str:
        """The split of a file's documents."""
        return TRAIN

    def check(self, names: Sequence[str]) -> None:
        """Refuse a corpus whose file names alone show that a split would be empty.

        Raises:
            UserError: there is no file for a split.
        """

    def of_text(self, text: str, split: str) -> str:
        """The split of one document in a file of `split`."""
        return split

    def held_out(self, counts: Sequence[int]) -> list[list[int]]:
        """For each file, the numbers of the records that are held out."""
        return [[] for _ in counts]

    def settings(self) -> dict[str, Any]:
        """The rule, as it is written down in the manifest."""
        return {"rule": type(self).__name__, **vars(self)}


class Folders(Splits):
    """The corpus has its own splits, told apart by how the file names begin.

    Args:
        prefixes: beginning of the name → split.
    """

    def __init__(self, prefixes: dict[str, str]) -> None:
        self.prefixes = prefixes

    def of_file(self, name: str) -> str:
        for prefix, split in self.prefixes.items():
            if name.startswith(prefix):
                return split
        return TRAIN

    def check(self, names: Sequence[str]) -> None:
        there = {self.of_file(name) for name in names}
        for prefix, split in self.prefixes.items():
            if split != TEST and split not in there:
                raise UserError(
                    f"The corpus has no file whose name begins with {prefix} for the {split} split: "
                    "set --source to a complete copy in the hub's layout."
                )


class HeldOutDocuments(Splits):
    """A seeded random choice of so many documents is the validation split (OpenWebText: 10,000).

    Args:
        documents: how many.
        seed: of the choice.
    """

    needs_counts = True

    def __init__(self, documents: int, seed: int = 42) -> None:
        if seed < 0:
            raise UserError(f"--seed must be at least 0, not {seed}.")
        self.documents, self.seed = documents, seed

    def held_out(self, counts: Sequence[int]) -> list[list[int]]:
        total = sum(counts)
        if not 0 < self.documents < total:
            raise UserError(
                f"The corpus has {total:,} documents and {self.documents:,} are to be held out for validation: "
                "set --val-documents to a smaller number."
            )
        chosen = np.sort(np.random.default_rng(self.seed).choice(total, self.documents, replace=False))
        starts = np.cumsum([0, *counts])
        pieces = np.searchsorted(chosen, starts)
        return [(chosen[pieces[file] : pieces[file + 1]] - starts[file]).tolist() for file in range(len(counts))]


class FirstTokens(Splits):
    """The first documents of the first file are the validation split (FineWeb: those of 10,485,760 tokens).

    Whole documents, so that none is split in two: the last of them goes past that number, and the DataModule
    reads exactly the first `tokens`.
    """

    def __init__(self, tokens: int) -> None:
        if tokens < 1:
            raise UserError(f"--val-tokens must be at least 1, not {tokens}.")
        self.tokens = tokens

    @property
    def first_tokens(self) -> int:  # type: ignore[override]
        return self.tokens


class ContentFraction(Splits):
    """A document is held out by nothing but a hash of its text, so it stays on its side whatever else changes.

    Args:
        fraction: part of the documents that is held out, in (0, 1).
    """

    def __init__(self, fraction: float) -> None:
        if not 0 < fraction < 1:
            raise UserError(f"val_fraction must be between 0 and 1, not {fraction}.")
        self.fraction = fraction

    def of_text(self, text: str, split: str) -> str:
        return VAL if is_held_out(hashlib.sha256(text.encode()).hexdigest(), self.fraction) else split


def is_held_out(sha256: str, fraction: float) -> bool:
    """Whether a document with this content hash belongs to validation."""
    return int(sha256[:8], 16) < fraction * 2**32
