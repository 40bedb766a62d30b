"""Rules that divide documents into training, validation and test: one small class for each."""

import hashlib
from collections.abc import Sequence
from typing import Any

from anlit.data.storage.manifest import TEST, TRAIN, VAL
from anlit.errors import UserError


class Splits:
    """Base: every document is trained on. A subclass changes the one method that its rule needs."""

    first_tokens = 0
    """How many tokens of the first task are held out; the document that holds the last of them goes with them."""

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


class FirstTokens(Splits):
    """The first documents of the first file are the validation split (FineWeb: those of 10,485,760 tokens).

    Whole documents, so that none is split in two: the last of them goes past that number, and the DataModule
    reads exactly the first `tokens`.
    """

    def __init__(self, tokens: int) -> None:
        if tokens < 1:
            raise UserError(f"--val_tokens must be at least 1, not {tokens}.")
        self.first_tokens = tokens


class ContentFraction(Splits):
    """A hash of its text alone decides about a document: it stays in its split whatever else changes, with its copies.

    So no text is both trained on and held out. The papers hold out random documents of OpenWebText (anGPT 10,000,
    nanoGPT 0.05 %) without looking whether training has the same text again.

    Args:
        fraction: part of the documents that is held out, in (0, 1).
    """

    def __init__(self, fraction: float) -> None:
        self.fraction = checked_fraction(fraction)

    def of_text(self, text: str, split: str) -> str:
        return VAL if is_held_out(hashlib.sha256(text.encode()).hexdigest(), self.fraction) else split


def checked_fraction(fraction: float) -> float:
    """Raise UserError unless the fraction of the documents leaves some on both sides."""
    if not 0 < fraction < 1:
        raise UserError(f"val_fraction must be between 0 and 1, not {fraction}.")
    return fraction


def is_held_out(sha256: str, fraction: float) -> bool:
    """Whether a document with this content hash belongs to validation."""
    return int(sha256[:8], 16) < fraction * 2**32
