"""The results of a study so far: the points of each grid, each arm's best setting, and its measured runs."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from anlit.analysis.comparison import Comparison, compare_groups
from anlit.analysis.study.plan import Arm, PlannedComparison, Setting, Study, Trial
from anlit.analysis.study.state import State, state_of
from anlit.errors import UserError
from anlit.reading import read_json
from anlit.runs.folders import Run, load_run
from anlit.runs.groups import Group, learned_settings


class GridPoint(NamedTuple):
    """One point of an arm's grid: its mean final validation loss over the tuning seeds, infinite if one failed."""

    setting: Setting
    loss: float
    states: tuple[State, ...]


class Tuning(NamedTuple):
    """The points of an arm's grid, best first; `edges` names settings whose best value is at an end of the grid."""

    arm: Arm
    points: list[GridPoint]
    edges: list[str]

    @property
    def best(self) -> Setting | None:
        """The setting to measure; None until all runs have ended, or if each point failed."""
        ended = all(state.has_ended for point in self.points for state in point.states)
        return self.points[0].setting if ended and self.points[0].loss < math.inf else None


def tune(study: Study, output: Path) -> list[Tuning]:
    """The tuning of each arm under `output`, as far as it is; a point that failed comes last."""
    tunings = []
    for arm in (arm for arm in study.arms if arm.is_tuned and study.tuning_seeds):
        points = []
        for setting in arm.points:
            folders = [output / Trial(arm, setting, seed).name for seed in study.tuning_seeds]
            states = tuple(map(state_of, folders))
            curves = [load_run(folder).curve.finite() for folder, state in zip(folders, states, strict=True)
                      if state.status == "finished"]  # fmt: skip
            ends = [float(curve.loss[-1]) for curve in curves if len(curve)]
            points.append(GridPoint(setting, sum(ends) / len(ends) if len(ends) == len(folders) else math.inf, states))
        points.sort(key=lambda point: point.loss)
        edges = edges_of(arm.points, points[0].setting) if points[0].loss < math.inf else []
        tunings.append(Tuning(arm, points, edges))
    return tunings


def select(study: Study, tunings: list[Tuning]) -> dict[str, Setting]:
    """Arm's name → the setting to measure. Arms whose tuning has not ended, or failed everywhere, are left out."""
    untuned = {arm.name: arm.points[0] for arm in study.arms if not arm.is_tuned}
    return untuned | {tuning.arm.name: tuning.best for tuning in tunings if tuning.best is not None}


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


class Point(NamedTuple):
    """A measured configuration as a point in a plot.

    `values` are those of its settings by short names, with `parameters`, `tokens`, `tokens_per_parameter` and `flops`
    (6·parameters·tokens) of its runs. `losses` are final, in nats per token; `failed` counts the seeds without one.
    """

    arm: Arm
    values: dict[str, Any]
    losses: tuple[float, ...]
    failed: int

    def number(self, name: str) -> float:
        """A value as a number; UserError if the study's configurations have no such number."""
        numbers = {key: value for key, value in self.values.items()
                   if isinstance(value, int | float) and not isinstance(value, bool)}  # fmt: skip
        if name not in numbers:
            raise UserError(f"a section asks for '{name}', which is no number of arm '{self.arm.name}': give one of "
                            + ", ".join(numbers))  # fmt: skip
        return float(numbers[name])


@dataclass(frozen=True, eq=False)
class StudyResults:
    """The content of a study's run folders; `command` is what the user typed."""

    study: Study
    output: Path
    command: str
    tunings: list[Tuning]
    """Each tuned arm's grid."""
    selected: dict[str, Setting]
    """Arm's name → the setting that is measured; arms whose tuning has not ended are not in it."""
    runs: list[tuple[Trial, State, Run | None]]
    """Every planned run so far with its state, and what its folder holds if it has begun."""

    def measured(self, arm: Arm) -> tuple[Run, ...]:
        """The arm's runs on the seeds that measure, whatever their state."""
        names = {trial.name for trial in self.study.measured_runs(self.selected) if trial.arm is arm}
        return tuple(run for trial, _, run in self.runs if run is not None and trial.name in names)

    def group(self, arm: Arm) -> Group | None:
        """The measured runs as one group; None if none can be compared yet."""
        runs = tuple(run for run in self.measured(arm) if run.config)
        return Group(arm.title, runs, learned_settings(runs[0])) if any(run.comparable for run in runs) else None

    @cached_property
    def comparisons(self) -> list[tuple[PlannedComparison, Comparison | None]]:
        """Those of the study as `anlit compare` would make them, with arms as groups; None without a baseline's run."""
        comparisons = []
        for number, planned in enumerate(self.study.comparisons, 1):
            groups = {arm: group for arm in planned.arms if (group := self.group(arm)) is not None}
            runs = [run for group in groups.values() for run in group.runs]
            given = runs, self.output, self.command, f"{number}-"
            baseline = groups.get(planned.baseline)
            comparisons.append((planned, compare_groups([*groups.values()], baseline, *given) if baseline else None))
        return comparisons

    def points(self) -> list[Point]:
        """The measured arms."""
        points = []
        for arm in (arm for arm in self.study.arms if arm.name in self.selected):
            runs = [run for run in self.measured(arm) if run.complete]
            values: dict[str, Any] = {**arm.varied.shown, **self.selected[arm.name].shown}
            if runs:
                values["tokens"] = tokens = float(runs[0].curve.tokens[-1])
                if parameters := runs[0].parameters:
                    values |= {"parameters": parameters, "tokens_per_parameter": tokens / parameters}
                    values["flops"] = 6.0 * parameters * tokens
            losses = tuple(run.final_loss for run in runs)
            points.append(Point(arm, values, losses, len(self.study.seeds) - len(losses)))
        return points


def results_of(study: Study, output: Path, command: str = "") -> StudyResults:
    """Reads every run folder that the study has so far."""
    tunings = tune(study, output)
    selected = select(study, tunings)
    runs = []
    for name, trial in {trial.name: trial for trial in planned(study, selected)}.items():
        state = state_of(output / name)
        runs.append((trial, state, load_run(output / name) if state.status != "pending" else None))
    return StudyResults(study, output, command, tunings, selected, runs)


def planned(study: Study, selected: dict[str, Setting]) -> list[Trial]:
    """The runs of both phases, the measured ones as far as their settings are selected."""
    return [*study.tuning_runs(), *study.measured_runs(selected)]


def refuse_other_study(study: Study, output: Path) -> None:
    """Raises:
    UserError: `output` has the report of another study, or of another budget.
    """
    path = output / "report.json"
    if path.exists():
        record = read_json(path, {"path": str, "budget": str}, "remove it, or give another --output")
        theirs = (Path(str(record.get("path"))).stem, record.get("budget"))
        if theirs != (Path(study.path).stem, study.budget):
            raise UserError(f"--output {output} has the report of another study ({theirs[0]}, budget "
                            f"{theirs[1] or 'none'}): give another folder, or remove that report")  # fmt: skip
