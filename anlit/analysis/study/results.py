"""The results of a study so far: the points of each grid, each arm's best setting, and its measured runs."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anlit.analysis.study.plan import Arm, Setting, Study, Trial
from anlit.analysis.study.state import State, state_of
from anlit.errors import UserError
from anlit.reading import read_json
from anlit.runs.folders import Run, load_run
from anlit.runs.groups import Group, learned_settings


@dataclass(frozen=True, eq=False)
class GridPoint:
    """One point of an arm's grid: its mean final validation loss over the tuning seeds, infinite if one failed."""

    setting: Setting
    loss: float
    states: tuple[State, ...]


@dataclass(frozen=True, eq=False)
class Tuning:
    """The points of an arm's grid, best first; `edges` names settings whose best value is at an end of the grid."""

    arm: Arm
    points: tuple[GridPoint, ...]
    edges: tuple[str, ...]

    @property
    def best(self) -> GridPoint:
        return self.points[0]

    @property
    def has_ended(self) -> bool:
        return all(state.has_ended for point in self.points for state in point.states)


def tune(study: Study, output: Path) -> list[Tuning]:
    """The tuning of each arm under `output`, as far as it is; a point that failed comes last."""
    tunings = []
    for arm in study.arms if study.tuning_seeds else ():
        if arm.is_tuned:
            points = []
            for setting in arm.points:
                folders = [output / Trial(arm, setting, seed).name for seed in study.tuning_seeds]
                loss = sum(map(_final_loss, folders)) / len(folders)
                points.append(GridPoint(setting, loss, tuple(map(state_of, folders))))
            points.sort(key=lambda point: point.loss)
            edges = edges_of(arm.points, points[0].setting) if points[0].loss < math.inf else []
            tunings.append(Tuning(arm, tuple(points), tuple(edges)))
    return tunings


def _final_loss(folder: Path) -> float:
    """The last validation loss of a finished run in nats per token; infinite for every other run."""
    if state_of(folder).status != "finished":
        return math.inf
    losses = load_run(folder).curve.finite().loss
    return float(losses[-1]) if len(losses) else math.inf


def select(study: Study, output: Path) -> dict[str, Setting]:
    """Arm's name → the setting to measure. Arms whose tuning has not ended, or failed everywhere, are left out."""
    return _best(study, tune(study, output))


def _best(study: Study, tunings: list[Tuning]) -> dict[str, Setting]:
    untuned = {arm.name: arm.points[0] for arm in study.arms if not arm.is_tuned}
    return untuned | {tuning.arm.name: tuning.best.setting for tuning in tunings
                      if tuning.has_ended and tuning.best.loss < math.inf}  # fmt: skip


def require_selection(study: Study, selected: dict[str, Setting]) -> None:
    """Raises:
    UserError: no arm at all has a setting that can be measured.
    """
    if not selected:
        raise UserError(f"none of the tuning runs of {study.path} succeeded: see fit.log in the run folders")


def edges_of(settings: tuple[Setting, ...], best: Setting) -> list[str]:
    """Settings of `best` whose value is the largest or smallest of several.

    Only points that share all other settings with `best` are compared, because only these bound it. A point that leaves
    the setting at its default has no value to compare.
    """
    edges = []
    for key, value in best.shown.items():
        rest = {name: other for name, other in best.shown.items() if name != key}
        line = [each.shown for each in settings if {**each.shown, key: value} == best.shown]
        values = {shown[key] for shown in line if key in shown}
        numbers = sorted(each for each in values if isinstance(each, int | float) and not isinstance(each, bool))
        if len(numbers) > 1 and value in (numbers[0], numbers[-1]):
            end = "smallest" if value == numbers[0] else "largest"
            unset = " that were set; the default was tried too" if rest in line else ""
            edges.append(f"{key} {value:g} is the {end} of {len(numbers)}{unset}")
    return edges


@dataclass(frozen=True, eq=False)
class Point:
    """A measured configuration as a point in a plot.

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
        return [self._point(arm) for arm in self.study.arms if arm.name in self.selected]

    def _point(self, arm: Arm) -> Point:
        runs = [run for run in self.measured(arm) if run.complete]
        values: dict[str, Any] = {**arm.varied.shown, **self.selected[arm.name].shown}
        if runs:
            tokens = float(runs[0].curve.tokens[-1])
            values["tokens"] = tokens
            if parameters := runs[0].parameters:
                values |= {"parameters": parameters, "tokens_per_parameter": tokens / parameters}
                values["flops"] = 6.0 * parameters * tokens
        losses = tuple(run.final_loss for run in runs)
        return Point(arm, values, losses, len(self.study.seeds) - len(losses))


def results_of(study: Study, output: Path, command: str) -> StudyResults:
    """Reads every run folder that the study has so far."""
    tunings = tune(study, output)
    selected = _best(study, tunings)
    runs = []
    for name, run in {run.name: run for run in [*study.tuning_runs(), *study.measured_runs(selected)]}.items():
        state = state_of(output / name)
        runs.append((run, state, load_run(output / name) if state.status != "pending" else None))
    return StudyResults(study, output, command, tuple(tunings), selected, tuple(runs))


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
