"""Groups checkpoints: runs of one configuration with different seeds are one arm."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from anlit.checkpoints.loading import Checkpoint
from anlit.runs.folders import load_run
from anlit.runs.groups import group_runs


@dataclass(frozen=True, eq=False)
class Origin:
    """The origin of a checkpoint, without the model."""

    file: Path
    label: str
    """Architecture and attention mechanism."""
    run: Path | None
    """The run folder of the file, None if there is none."""
    step: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Origin:
        return cls(checkpoint.file, checkpoint.label, checkpoint.run, checkpoint.step)

    @property
    def name(self) -> str:
        """The name of this checkpoint alone."""
        location = f"{self.run.name}/{self.file.name}" if self.run is not None else str(self.file)
        return f"{location}, step {self.step:,}"


@dataclass(frozen=True, eq=False)
class Arm:
    """Checkpoints of one configuration."""

    label: str
    """Unique among the arms."""
    members: tuple[int, ...]
    """Indices of the checkpoints in the list."""


def group_by_seed(origins: Sequence[Origin]) -> list[Arm]:
    """The arms in the order of their first checkpoint. A file outside a run folder is an arm of its own.

    best.ckpt and last.ckpt of a run are different arms. Fine-tuned runs may start from different weights and still be
    one arm, because each seed has its own.
    """
    runs = [load_run(origin.run) if origin.run is not None else None for origin in origins]
    labels: dict[Path, str] = {}
    for group in group_runs([run for run in runs if run is not None]):
        labels |= {run.folder.resolve(): group.label for run in group.runs}
    found: dict[tuple[str, str], list[int]] = {}  # label and file name → indices
    for index, (origin, run) in enumerate(zip(origins, runs, strict=True)):
        label = labels.get(run.folder.resolve()) if run is not None else None
        # Without a run's configuration it is not known what the file has in common with others.
        found.setdefault((label, origin.file.name) if label else (origin.label, str(origin.file)), []).append(index)
    n_arms = Counter(label for label, _ in found)
    arms = []
    for (label, file), members in found.items():
        name = origins[members[0]].name if len(members) == 1 else file
        arms.append(Arm(f"{label}, {name}" if n_arms[label] > 1 else label, tuple(members)))
    return arms


def mean_and_sd(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation over seeds.

    Both are None if a value is missing. The standard deviation is None too for one value, or if one is not finite.
    """
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None, None
    if not all(math.isfinite(value) for value in known):
        return sum(known), None  # NaN or ±∞, like the mean
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None
