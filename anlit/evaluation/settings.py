"""The settings of `anlit lengths`, `needle` and `diagnose`; without torch, because --help shows them.

A setting that is out of its range is a UserError.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from anlit.errors import UserError

MULTIPLES = (1, 4, 16)
"""The default lengths of `lengths` and `needle`, as multiples of the training length."""
MOST_TOKENS = 1 << 20
BATCH_TOKENS = 1 << 14
DIAGNOSED_LENGTHS = (256, 1024, 4096)
"""The default lengths of `diagnose`."""
NORMAL_LENGTHS = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
"""Keys of independent normal scores."""
NORMAL_SEEDS = 1 << 63


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

    def __post_init__(self) -> None:
        require_at_least(1, tokens=self.tokens, batch_tokens=self.batch_tokens)


@dataclass(frozen=True)
class NeedleSettings(Settings):
    """How `anlit needle` measures."""

    n_depths: int = 11
    """Number of depths, evenly from the beginning of the text to its end; a single one is in the middle."""
    n_samples: int = 20
    """Samples at each depth and length."""
    seed: int = 0
    """Seed of the samples."""

    def __post_init__(self) -> None:
        require_at_least(1, depths=self.n_depths, samples=self.n_samples)
        require_at_least(0, seed=self.seed)

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

    def __post_init__(self) -> None:
        require_at_least(1, tokens=self.tokens)


def require_at_least(least: int, **options: int | None) -> None:
    """Raise UserError for an option whose number is too small; None is not checked."""
    for name, value in options.items():
        if value is not None and value < least:
            raise UserError(f"--{name} is {value}: set it to {least} or more")


def parse_lengths(text: str) -> tuple[int, ...]:
    """`256,1024` → (256, 1024), ascending; raises UserError if it is no list of positive whole numbers."""
    parts = [part.strip().replace("_", "") for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--lengths {text!r} is no list of positive whole numbers: write it as 256,1024,4096")
    return tuple(sorted({int(part) for part in parts}))


def parse_masking(text: str) -> tuple[bool, ...]:
    """`on,off` → (True, False); raises UserError if it names something else."""
    parts = text.split(",")
    if not set(parts) <= {"on", "off"}:
        raise UserError(f"--masking {text!r} is unknown: choose on, off or on,off")
    return tuple(value for name, value in (("on", True), ("off", False)) if name in parts)
