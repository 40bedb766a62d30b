"""The checkpoints that an evaluation compares. Runs of one configuration with different seeds are one arm."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anlit.checkpoints.loading import describe, load_checkpoint
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
    run: Path | None
    """The run folder of the file, None if there is none."""
    masked: bool
    """Whether it was trained with document masking."""
    description: dict[str, Any]
    """Its entry in the record."""
    data: TokenShards
    """The data that it is evaluated on."""

    @property
    def name(self) -> str:
        """The run's name with the file's and the step."""
        location = f"{self.run.name}/{self.file.name}" if self.run is not None else str(self.file)
        return f"{location}, step {self.description['step']:,}"


def load_candidates(paths: Sequence[str], data_path: str | None) -> list[Candidate]:
    """Load each checkpoint and its data once, before anything is measured.

    Args:
        paths: Run folders or .ckpt files; a file that is named twice counts once.
        data_path: A prepared folder instead of the runs' own data.

    Raises:
        UserError: A checkpoint or its data are wrong, or two have different data.
    """
    candidates: list[Candidate] = []
    for file in {file.resolve(): file for file in map(find_checkpoint, paths)}.values():
        checkpoint = load_checkpoint(str(file), "cpu")
        masked, data = checkpoint.model.model.document_masking, data_of(checkpoint, data_path)
        candidates.append(Candidate(file, checkpoint.run, masked, describe(checkpoint), data))
    first = candidates[0]
    for other in candidates[1:]:
        ours, theirs = first.data.fingerprint, other.data.fingerprint
        if ours["content_sha256"] != theirs["content_sha256"]:
            raise UserError(
                f"{first.file} and {other.file} have different data ({ours['path']} and {theirs['path']}), so their "
                "results cannot be compared: set --data"
            )
    return candidates


def group_by_seed(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """The arms: {label, checkpoints}, the latter as indices, in the order of their first checkpoint.

    best.ckpt and last.ckpt of a run are different arms. Fine-tuned runs may start from different weights and still be
    one arm, because each seed has its own. A file outside a run folder is an arm of its own. Labels are unique.
    """
    runs = [load_run(candidate.run) if candidate.run is not None else None for candidate in candidates]
    labels: dict[Path, str] = {}
    for group in group_runs([run for run in runs if run is not None]):
        labels |= {run.folder.resolve(): group.label for run in group.runs}
    arms: dict[tuple[str, str], list[int]] = {}  # label and file name → indices
    for index, (candidate, run) in enumerate(zip(candidates, runs, strict=True)):
        label = labels.get(run.folder.resolve()) if run is not None else None
        # Without a run's configuration it is not known what the file has in common with others.
        key = (label, candidate.file.name) if label else (candidate.description["label"], str(candidate.file))
        arms.setdefault(key, []).append(index)
    n_arms = Counter(label for label, _ in arms)
    named = []
    for (label, file), members in arms.items():
        name = candidates[members[0]].name if len(members) == 1 else file
        named.append({"label": f"{label}, {name}" if n_arms[label] > 1 else label, "checkpoints": members})
    return named
