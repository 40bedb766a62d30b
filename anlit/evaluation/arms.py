"""The checkpoints that an evaluation compares. Runs of one configuration with different seeds are one arm."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anlit.checkpoints.loading import Checkpoint, describe, load_checkpoint
from anlit.checkpoints.location import find_checkpoint
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.evaluation.data import data_of
from anlit.runs.folders import load_run
from anlit.runs.groups import group_runs


@dataclass(frozen=True, eq=False)
class Candidate:
    """A checkpoint that has passed all checks, without its model."""

    file: Path
    label: str
    """Architecture and attention mechanism."""
    run: Path | None
    """The run folder of the file, None if there is none."""
    step: int
    masked: bool
    """Whether it was trained with document masking."""
    description: dict[str, Any]
    """Its entry in the record."""
    data: TokenShards
    """The data that it is evaluated on."""


@dataclass(frozen=True, eq=False)
class Arm:
    """Checkpoints of one configuration."""

    label: str
    """Unique among the arms."""
    members: tuple[int, ...]
    """Indices of the checkpoints in the list."""


def load_candidates(paths: Sequence[str], data_path: str | None) -> list[Candidate]:
    """Load each checkpoint and its data once, before anything is measured.

    Args:
        paths: Run folders or .ckpt files; a file that is named twice counts once.
        data_path: A prepared folder instead of the runs' own data.

    Raises:
        UserError: A checkpoint or its data are wrong, or two have different data.
    """
    found: list[Candidate] = []
    for file in {file.resolve(): file for file in map(find_checkpoint, paths)}.values():
        checkpoint = load_checkpoint(str(file), "cpu")
        masked, data = checkpoint.model.model.document_masking, data_of(checkpoint, data_path)
        found.append(
            Candidate(file, checkpoint.label, checkpoint.run, checkpoint.step, masked, describe(checkpoint), data)
        )
    for other in found[1:]:
        one, two = found[0].data.fingerprint, other.data.fingerprint
        if one["content_sha256"] != two["content_sha256"]:
            raise UserError(
                f"{found[0].file} and {other.file} have different data ({one['path']} and {two['path']}), so their "
                "results cannot be compared: set --data"
            )
    return found


def group_by_seed(checkpoints: Sequence[Candidate | Checkpoint]) -> list[Arm]:
    """The arms in the order of their first checkpoint. A file outside a run folder is an arm of its own.

    best.ckpt and last.ckpt of a run are different arms. Fine-tuned runs may start from different weights and still be
    one arm, because each seed has its own.
    """
    runs = [load_run(one.run) if one.run is not None else None for one in checkpoints]
    labels: dict[Path, str] = {}
    for group in group_runs([run for run in runs if run is not None]):
        labels |= {run.folder.resolve(): group.label for run in group.runs}
    found: dict[tuple[str, str], list[int]] = {}  # label and file name → indices
    for index, (one, run) in enumerate(zip(checkpoints, runs, strict=True)):
        label = labels.get(run.folder.resolve()) if run is not None else None
        # Without a run's configuration it is not known what the file has in common with others.
        found.setdefault((label, one.file.name) if label else (one.label, str(one.file)), []).append(index)
    n_arms = Counter(label for label, _ in found)
    arms = []
    for (label, file), members in found.items():
        name = _name(checkpoints[members[0]]) if len(members) == 1 else file
        arms.append(Arm(f"{label}, {name}" if n_arms[label] > 1 else label, tuple(members)))
    return arms


def _name(one: Candidate | Checkpoint) -> str:
    """The name of one checkpoint alone."""
    location = f"{one.run.name}/{one.file.name}" if one.run is not None else str(one.file)
    return f"{location}, step {one.step:,}"
