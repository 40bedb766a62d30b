"""The settings of `anlit lengths`, `needle` and `diagnose`; without torch, because --help shows them."""

from collections.abc import Iterable
from dataclasses import dataclass

MULTIPLES = (1, 4, 16)
"""The default lengths of `lengths` and `needle`, as multiples of the training length."""
MOST_TOKENS = 1 << 20
BATCH_TOKENS = 1 << 14
DIAGNOSED_LENGTHS = (256, 1024, 4096)
"""The default lengths of `diagnose`."""
NORMAL_LENGTHS = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
"""Keys of independent normal scores."""


@dataclass(frozen=True)
class Settings:
    """What every evaluation of checkpoints needs."""

    lengths: tuple[int, ...] | None = None
    """Tokens per sequence or sample; by default 1, 4 and 16 times each model's training length."""
    data: str | None = None
    """A prepared folder instead of the runs' own."""
    device: str = "auto"

    def lengths_for(self, training_lengths: Iterable[int]) -> list[int]:
        """The lengths, by default the multiples of every training length; ascending."""
        return sorted(set(self.lengths or [k * length for length in training_lengths for k in MULTIPLES]))


@dataclass(frozen=True)
class LengthsSettings(Settings):
    """How `anlit lengths` measures."""

    tokens: int | None = None
    """The number of targets, in pieces spread over the validation split, rounded down to a multiple of every length. By
    default all, but at most 1,048,576 or one sequence of the longest length."""
    batch_tokens: int = BATCH_TOKENS
    """Tokens per batch, which has at least one sequence."""
    masking: tuple[bool, ...] = (True, False)
    """Values of document masking to measure with."""


@dataclass(frozen=True)
class NeedleSettings(Settings):
    """How `anlit needle` measures."""

    n_depths: int = 11
    """Number of depths, evenly from the beginning of the text to its end; a single one is in the middle."""
    n_samples: int = 20
    """Samples at each depth and length."""
    seed: int = 0
    """Seed of the samples."""

    @property
    def depths(self) -> list[float]:
        """The depths, from 0 to 1."""
        return [i / (self.n_depths - 1) for i in range(self.n_depths)] if self.n_depths > 1 else [0.5]


@dataclass(frozen=True)
class DiagnoseSettings(Settings):
    """How `anlit diagnose` measures."""

    tokens: int = 16_384
    """Tokens read at each length, rounded up to a complete sequence."""
    masking: bool | None = None
    """Whether tokens attend only within their document; None for the setting of the training."""
