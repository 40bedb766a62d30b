"""The results of a study so far: the points of each grid, each arm's best setting, and its measured runs."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from anlit.compare.comparison import Comparison, compare_groups
from anlit.compare.statistics import Summary
from anlit.errors import UserError
from anlit.runs.folders import Run, load_run
from anlit.runs.groups import Group, learned_settings
from anlit.study.estimate import configuration_of
from anlit.study.plan import Arm, PlannedComparison, Setting, Study, Trial
from anlit.study.state import State, state_of


class GridPoint(NamedTuple):
    """One point of an arm's grid: its mean final validation loss over the tuning seeds, infinite if one failed."""

    setting: Setting
    loss: float
    states: tuple[State, ...]


class Tuning(NamedTuple):
    """The points of an arm's grid, best first."""

    arm: Arm
    points: list[GridPoint]

    @property
    def has_ended(self) -> bool:
        """All its runs have; until then no point is the best."""
        return all(state.has_ended for point in self.points for state in point.states)

    @property
    def edges(self) -> list[str]:
        """Settings whose best value is the largest or smallest of the points that differ in nothing else."""
        shown, edges = self.best.shown if self.best is not None else {}, []
        for key, value in shown.items():
            line = [
                each.shown[key]
                for each in self.arm.points
                if each.shown == shown | {key: each.shown.get(key)}
            ]
            ends = sorted(set(filter(is_number, line)))
            if len(ends) > 1 and value in (ends[0], ends[-1]):
                edges.append(
                    f"{key} {value:g} is the {'smallest' if value == ends[0] else 'largest'} of {len(ends)}"
                )
        return edges

    @property
    def best(self) -> Setting | None:
        """The setting to measure; None until all runs have ended, or if each point failed."""
        return self.points[0].setting if self.has_ended and self.points[0].loss < math.inf else None


def tune(study: Study, output: Path) -> list[Tuning]:
    """The tuning of each arm under `output`, as far as it is; a point that failed comes last."""
    tunings = []
    for arm in (arm for arm in study.arms if arm.is_tuned and study.tuning_seeds):
        points = []
        for setting in arm.points:
            folders = [output / Trial(arm, setting, seed).name for seed in study.tuning_seeds]
            states = tuple(map(state_of, folders))
            finished = [
                each
                for each, state in zip(folders, states, strict=True)
                if state.status == "finished"
            ]
            ends = [run.final_loss for run in map(load_run, finished) if len(run.curve)]
            points.append(
                GridPoint(
                    setting,
                    sum(ends) / len(ends) if len(ends) == len(folders) else math.inf,
                    states,
                )
            )
        tunings.append(Tuning(arm, sorted(points, key=lambda point: point.loss)))
    return tunings


def select(study: Study, tunings: list[Tuning]) -> dict[str, Setting]:
    """Arm's name → the setting to measure. Arms whose tuning has not ended, or failed everywhere, are left out."""
    untuned = {arm.name: arm.points[0] for arm in study.arms if not arm.is_tuned}
    return untuned | {tuning.arm.name: tuning.best for tuning in tunings if tuning.best is not None}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


MEASURED = ("parameters", "tokens", "tokens_per_parameter", "flops")
"""What every `Point` has beside its settings."""


class Point(NamedTuple):
    """A measured configuration as a point in a plot.

    `values` are those of its settings by short names, with those `MEASURED` of its runs; `flops` are
    6·parameters·tokens. `losses` are final, in nats per token; `failed` counts the seeds that have ended
    without one.
    """

    arm: Arm
    values: dict[str, Any]
    losses: tuple[float, ...]
    failed: int

    @property
    def summary(self) -> Summary:
        """The losses, None for each failed seed."""
        return Summary([*self.losses, *(None for _ in range(self.failed))])

    def number(self, name: str) -> float:
        """A value as a number; UserError if the study's configurations have no such number."""
        if not is_number(self.values.get(name)):
            raise UserError(f"a section asks for '{name}', which is no number of arm '{self.arm.name}': give one of "
                            + ", ".join(key for key, value in self.values.items() if is_number(value)))  # fmt: skip
        return float(self.values[name])


@dataclass(frozen=True, eq=False)
class StudyResults:
    """The content of a study's run folders; `command` is what the user typed, `selected` the setting of each arm's name
    that is measured, `runs` the planned ones with their states and what their folders hold.
    """

    study: Study
    output: Path
    command: str
    tunings: list[Tuning]
    selected: dict[str, Setting]
    runs: list[tuple[Trial, State, Run | None]]

    def measured(self, arm: Arm) -> tuple[Run, ...]:
        """The arm's runs on the seeds that measure, whatever their state."""
        names = {
            trial.name for trial in self.study.measured_runs(self.selected) if trial.arm is arm
        }
        return tuple(run for trial, _, run in self.runs if run is not None and trial.name in names)

    def waits_for(self, arm: Arm) -> str:
        """What of an arm has not ended: `its tuning`, or the seeds that measure, such as `seed=2, seed=3`."""
        if any(tuning.arm is arm and not tuning.has_ended for tuning in self.tunings):
            return "its tuning"
        return ", ".join(
            trial.seed.name
            for trial, state, _ in self.runs
            if trial.arm is arm and not state.has_ended
        )

    def group(self, arm: Arm) -> Group | None:
        """The measured runs as one group; None if none can be compared yet."""
        runs = tuple(run for run in self.measured(arm) if run.config)
        known = next(
            (run for run in runs if run.comparable), None
        )  # one that failed early has not recorded its data
        return Group(arm.title, runs, learned_settings(known)) if known else None

    @cached_property
    def comparisons(self) -> list[tuple[PlannedComparison, Comparison | None]]:
        """Those of the study as `anlit compare` would make them, with arms as groups; None without a baseline's run."""
        comparisons = []
        for number, planned in enumerate(self.study.comparisons, 1):
            groups = {arm: group for arm in planned.arms if (group := self.group(arm)) is not None}
            every, baseline = list(groups.values()), groups.get(planned.baseline)
            given = (
                [run for group in every for run in group.runs],
                self.output,
                self.command,
                f"{number}-",
            )
            comparisons.append(
                (planned, compare_groups(every, baseline, *given) if baseline else None)
            )
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
                    values |= {
                        "parameters": parameters,
                        "tokens_per_parameter": tokens / parameters,
                    }
                    values["flops"] = 6.0 * parameters * tokens
            losses = tuple(run.final_loss for run in runs)
            points.append(Point(arm, values, losses, sum(run.lost for run in self.measured(arm))))
        return points


def results_of(study: Study, output: Path, command: str = "") -> StudyResults:
    """Reads every run folder that the study has so far."""
    tunings = tune(study, output)
    selected = select(study, tunings)
    runs = []
    for name, trial in {trial.name: trial for trial in planned(study, selected)}.items():
        state = state_of(output / name)
        run = load_run(output / name) if state.status != "pending" else None
        if (
            run is not None and state.status == "failed"
        ):  # killed, it cannot say so; ended early, it has no config.yaml
            said = {"status": "failed", "error": run.record.get("error") or state.reason}
            run = replace(
                run, config=run.config or configuration_of(trial), record=run.record | said
            )
        runs.append((trial, state, run))
    return StudyResults(study, output, command, tunings, selected, runs)


def planned(study: Study, selected: dict[str, Setting]) -> list[Trial]:
    """The runs of both phases, the measured ones as far as their settings are selected."""
    return [*study.tuning_runs(), *study.measured_runs(selected)]
