"""The shapes of `anlit benchmark attention`, and its presets."""

from dataclasses import dataclass

import torch

from anlit.attention.documents import Documents
from anlit.attention.trial import random_documents

MEAN_DOCUMENT = 1 / 8
"""Mean length of a document, in T: lengths are drawn from an exponential distribution, some of a few tokens."""

LAYOUTS = ("dense", "documents")
"""Each row one document, or many in each."""
Entrant = tuple[str, str]
"""A mechanism and the kernel that computes it."""


@dataclass(frozen=True)
class Shape:
    """The tensors that all entrants get: batch × heads × length × width."""

    width: int
    length: int
    documents: bool
    heads: int
    batch: int

    @property
    def label(self) -> str:
        return f"D {self.width}, T {self.length}, {'documents' if self.documents else 'dense'}"


@dataclass(frozen=True)
class Plan:
    """A preset.

    Args:
        entrants: Each a mechanism and a kernel.
        widths: D.
        lengths: T.
        tokens: B·T at least; one sequence where T is more.
        d_model: H·D.
        dtype: Of q, k, v.
        rounds: How often the entrants take turns.
        layouts: Of `LAYOUTS`.
    """

    entrants: tuple[Entrant, ...]
    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: int
    d_model: int
    dtype: torch.dtype
    rounds: int
    layouts: tuple[str, ...] = LAYOUTS

    def shapes(self) -> list[Shape]:
        """The shapes from the shortest to the longest, so that a time limit leaves out the longest."""
        return [
            Shape(width, length, layout == "documents", max(1, self.d_model // width), max(1, self.tokens // length))
            for length in self.lengths
            for width in self.widths
            for layout in self.layouts
        ]


def entrants(text: str) -> tuple[Entrant, ...]:
    """From `mechanism,kernel mechanism,kernel …`."""
    return tuple((mechanism, kernel) for mechanism, _, kernel in (entry.partition(",") for entry in text.split()))


PRESETS = {
    "h200": Plan(
        entrants("plain,sdpa plain,flash plain,flex plain,triton log-n,flash scale-invariant,flex "
                 "scale-invariant,triton scale-invariant-learned,triton"),
        (64, 128), (2048, 4096, 16384, 65536), 16384, 2048, torch.bfloat16, 10,
    ),
    "cpu": Plan(
        entrants("plain,sdpa plain,blockwise plain,eager alibi,sdpa alibi,blockwise scale-invariant,blockwise "
                 "scale-invariant,eager"),
        (64,), (256, 1024, 4096), 4096, 128, torch.float32, 7,
    ),
}  # fmt: skip


def documents_of(shape: Shape, device: torch.device) -> Documents:
    """One document a row, or many of mixed length, the same for every entrant."""
    mean = MEAN_DOCUMENT * shape.length if shape.documents else None
    return random_documents(shape.batch, shape.length, mean, device)
