"""The results of a study so far: each arm's measured runs and the points of each grid."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anlit.analysis.study.grids import Setting
from anlit.analysis.study.plan import Arm, Study, Trial
from anlit.analysis.study.selection import Tuning, select, tune
from anlit.analysis.study.state import State, state_of
from anlit.errors import UserError
from anlit.reading import read_json
from anlit.runs.folders import Run, load_run
from anlit.runs.groups import Group, learned_settings


@dataclass(frozen=True, eq=False)
class Point:
    """A configuration as a point in a plot.

    Args:
        arm: The arm that it belongs to.
        values: Short setting name → value, with `parameters`, `tokens`, `tokens_per_parameter` and `flops`
            (6·parameters·tokens) of its runs.
        losses: Final validation losses in nats per token, one per seed.
        failed: Number of seeds without a loss.
    """

    arm: Arm
    values: dict[str, Any]
    losses: tuple[float, ...]
    failed: int

    @property
    def loss(self) -> float:
        """Mean over the seeds; infinite if none finished."""
        return sum(self.losses) / len(self.losses) if self.losses else math.inf

    def number(self, name: str) -> float:
        """A value as a number.

        Raises:
            UserError: The study's configurations have no such number.
        """
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            known = ", ".join(key for key, value in self.values.items() if isinstance(value, int | float))
            raise UserError(
                f"a section asks for '{name}', which is no number of arm '{self.arm.name}': give one of {known}"
            )
        return float(value)


@dataclass(frozen=True, eq=False)
class StudyResults:
    """The content of a study's run folders.

    Args:
        command: What the user typed, for the record.
        tunings: Each tuned arm's grid.
        selected: Arm's name → the setting that is measured; arms whose tuning has not ended are not in it.
        runs: Every planned run so far with its state, and what its folder holds if it has begun.
    """

    study: Study
    output: Path
    command: str
    tunings: tuple[Tuning, ...]
    selected: dict[str, Setting]
    runs: tuple[tuple[Trial, State, Run | None], ...]

    def measured(self, arm: Arm) -> tuple[Run, ...]:
        """The arm's runs on the seeds that measure, whatever their state."""
        names = {run.name for run in self.study.measured_runs(self.selected) if run.arm is arm}
        return tuple(read for run, _, read in self.runs if read is not None and run.name in names)

    def group(self, arm: Arm) -> Group | None:
        """The measured runs as one group; None if none can be compared yet."""
        runs = tuple(run for run in self.measured(arm) if run.config)
        if not any(run.comparable for run in runs):
            return None
        return Group(arm.title, runs, learned_settings(runs[0]))

    def points(self) -> list[Point]:
        """The measured arms."""
        return [self._point(arm, self.selected[arm.name]) for arm in self.study.arms if arm.name in self.selected]

    def _point(self, arm: Arm, choice: Setting) -> Point:
        names = {Trial(arm, choice, seed).name for seed in self.study.seeds}
        runs = [read for run, _, read in self.runs if run.name in names and read is not None and read.complete]
        values: dict[str, Any] = {**arm.varied.shown, **choice.shown}
        if runs:
            tokens = float(runs[0].curve.tokens[-1])
            values["tokens"] = tokens
            if parameters := runs[0].parameters:
                values |= {"parameters": parameters, "tokens_per_parameter": tokens / parameters}
                values["flops"] = 6.0 * parameters * tokens
        losses = tuple(float(run.curve.loss[-1]) for run in runs)
        return Point(arm, values, losses, len(self.study.seeds) - len(losses))


def results_of(study: Study, output: Path, command: str) -> StudyResults:
    """Reads every run folder that the study has so far."""
    selected = select(study, output)
    planned = {run.name: run for run in [*study.tuning_runs(), *study.measured_runs(selected)]}
    runs = []
    for name, run in planned.items():
        state = state_of(output / name)
        runs.append((run, state, load_run(output / name) if state.status != "pending" else None))
    return StudyResults(study, output, command, tuple(tune(study, output)), selected, tuple(runs))


def refuse_other_study(study: Study, output: Path) -> None:
    """Raises:
    UserError: `output` has the report of another study, or of another budget.
    """
    path = output / "report.json"
    if not path.exists():
        return
    record = read_json(path, {"path": str, "budget": str}, "remove it, or give another --output")
    theirs = (Path(str(record.get("path"))).stem, record.get("budget"))
    if theirs != (Path(study.path).stem, study.budget):
        known = f"{theirs[0]}, budget {theirs[1] or 'none'}"
        raise UserError(
            f"--output {output} has the report of another study ({known}): give another folder, or remove that report"
        )
