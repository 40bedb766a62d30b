"""The settings of `anlit lengths`, `needle` and `diagnose`.

This file imports no torch, because --help shows the defaults.
"""

from dataclasses import dataclass

MULTIPLES = (1, 4, 16)
"""The default lengths of `lengths` and `needle`, as multiples of the training length."""
MAX_DEFAULT_TOKENS = 1 << 20
"""Targets that `lengths` reads at most by default."""
NORMAL_LENGTHS = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)  # fmt: skip
"""Default numbers of keys of `diagnose --gaussian`."""


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of every evaluation of checkpoints."""

    lengths: tuple[int, ...] | None = None
    """Tokens per sequence or sample; None: `MULTIPLES`."""
    data: str | None = None
    """A prepared folder; None: the data of each run."""
    device: str = "auto"


@dataclass(frozen=True)
class LengthsSettings(EvaluationSettings):
    """Settings of `anlit lengths`."""

    tokens: int | None = None
    """Number of targets, rounded down to a multiple of every length.

    They are in pieces spread over the validation split. None: all targets, but at most
    `MAX_DEFAULT_TOKENS` or one sequence of the longest length.
    """
    batch_tokens: int = 1 << 14
    """Tokens per batch. A batch has at least one sequence."""
    masking: tuple[bool, ...] = (True, False)
    """Values of document masking to measure with."""


@dataclass(frozen=True)
class NeedleSettings(EvaluationSettings):
    """Settings of `anlit needle`."""

    n_depths: int = 11
    n_samples: int = 20
    """Samples at each depth and length."""
    seed: int = 0
    """Seed of the samples."""


@dataclass(frozen=True)
class DiagnoseSettings(EvaluationSettings):
    """Settings of `anlit diagnose`."""

    lengths: tuple[int, ...] | None = (256, 1024, 4096)
    tokens: int = 16_384
    """Tokens read at each length, rounded up to a complete sequence."""
    masking: bool | None = None
    """Whether tokens attend only within their document; None: as in training."""
