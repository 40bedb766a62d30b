"""The settings of `anlit lengths`, `needle` and `diagnose`; without torch, because --help shows them."""

from dataclasses import dataclass

MULTIPLES = (1, 4, 16)  # of the training length: the default lengths of `lengths` and `needle`
MOST_TOKENS = 1 << 20
NORMAL_LENGTHS = (
    10,
    30,
    100,
    300,
    1_000,
    3_000,
    10_000,
    30_000,
    100_000,
)  # keys of independent normal scores


@dataclass(frozen=True)
class Settings:
    """What every evaluation of checkpoints needs."""

    lengths: tuple[int, ...] | None = None  # tokens per sequence or sample; None: `MULTIPLES`
    data: str | None = None  # a prepared folder instead of the runs' own
    device: str = "auto"


@dataclass(frozen=True)
class LengthsSettings(Settings):
    """How `anlit lengths` measures."""

    tokens: int | None = None
    """The number of targets, in pieces spread over the validation split, rounded down to a multiple of every length. By
    default all, but at most `MOST_TOKENS` or one sequence of the longest length."""
    batch_tokens: int = 1 << 14  # per batch, which has at least one sequence
    masking: tuple[bool, ...] = (True, False)  # values of document masking to measure with


@dataclass(frozen=True)
class NeedleSettings(Settings):
    """How `anlit needle` measures: the number of depths, of samples at each depth and length, and their seed."""

    n_depths: int = 11
    n_samples: int = 20
    seed: int = 0


@dataclass(frozen=True)
class DiagnoseSettings(Settings):
    """How `anlit diagnose` measures."""

    lengths: tuple[int, ...] | None = (256, 1024, 4096)
    tokens: int = 16_384  # read at each length, rounded up to a complete sequence
    masking: bool | None = (
        None  # whether tokens attend only within their document; None: as in training
    )
