"""Which checkpoints belong together: runs of one configuration with different seeds are one arm."""

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
    """Where a checkpoint comes from; holds no model."""

    file: Path
    label: str
    """Architecture and attention mechanism."""
    run: Path | None
    """The run folder, where the file lies in one."""
    step: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Origin:
        return cls(checkpoint.file, checkpoint.label, checkpoint.run, checkpoint.step)

    @property
    def name(self) -> str:
        """What a label says of this checkpoint alone."""
        place = f"{self.run.name}/{self.file.name}" if self.run is not None else str(self.file)
        return f"{place}, step {self.step:,}"


@dataclass(frozen=True, eq=False)
class Arm:
    """Checkpoints of one configuration."""

    label: str
    """No other arm has it."""
    members: tuple[int, ...]
    """Places of the checkpoints in the list that was given."""


def group_by_seed(origins: Sequence[Origin]) -> list[Arm]:
    """The arms in the order of their first checkpoint; a file outside a run folder is one of its own.

    best.ckpt and last.ckpt of a run are different arms. Which weights fine-tuned runs began with does not part them:
    each seed has its own.
    """
    runs = [load_run(origin.run) if origin.run is not None else None for origin in origins]
    labels: dict[Path, str] = {}
    for group in group_runs([run for run in runs if run is not None]):
        labels |= {run.folder.resolve(): group.label for run in group.runs}
    found: dict[tuple[str, str], list[int]] = {}  # label and file name → places
    for place, (origin, run) in enumerate(zip(origins, runs, strict=True)):
        label = labels.get(run.folder.resolve()) if run is not None else None
        # Without a run's configuration nobody knows what the file shares with others.
        found.setdefault((label, origin.file.name) if label else (origin.label, str(origin.file)), []).append(place)
    bearers = Counter(label for label, _ in found)
    arms = []
    for (label, file), places in found.items():
        own = origins[places[0]].name if len(places) == 1 else file
        arms.append(Arm(f"{label}, {own}" if bearers[label] > 1 else label, tuple(places)))
    return arms


def mean_and_sd(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation over seeds.

    Both are None where a value is missing; the standard deviation also for one value, and where one is not finite.
    """
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None, None
    if not all(math.isfinite(value) for value in known):
        return sum(known), None  # NaN or ±∞, as the mean is
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None
