"""The settings of `anlit needle`."""

from dataclasses import dataclass

from anlit.evaluation.sequence_lengths import require_at_least


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Raises:
        UserError: A number is too small.
    """

    lengths: tuple[int, ...] | None = None
    """Tokens per sample; by default 1, 4 and 16 times each model's training length."""
    n_depths: int = 11
    """Number of depths, evenly from the beginning of the text to its end; a single one is in the middle."""
    n_samples: int = 20
    """Samples at each depth and length."""
    seed: int = 0
    """Seed of the samples."""
    data: str | None = None
    """A prepared folder instead of the runs' own."""
    device: str = "auto"

    def __post_init__(self) -> None:
        require_at_least(1, depths=self.n_depths, samples=self.n_samples)
        require_at_least(0, seed=self.seed)

    @property
    def depths(self) -> list[float]:
        """The depths, from 0 to 1."""
        return [i / (self.n_depths - 1) for i in range(self.n_depths)] if self.n_depths > 1 else [0.5]
