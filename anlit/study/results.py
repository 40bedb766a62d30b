"""The results of a study so far: the points of each grid, each arm's best point, and its runs."""

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
from anlit.study.estimate import merge_configuration
from anlit.study.grid import GridPoint
from anlit.study.plan import Arm, PlannedComparison, PlannedRun, Study
from anlit.study.state import State, read_state


class TunedPoint(NamedTuple):
    """A point of an arm's grid, or a draw, trained on the tuning seeds."""

    point: GridPoint
    loss: float
    """Mean final validation loss over the tuning seeds; infinite if a run has none."""
    states: tuple[State, ...]

    @property
    def has_ended(self) -> bool:
        return all(state.has_ended for state in self.states)


class Tuning(NamedTuple):
    """The tuning of an arm."""

    arm: Arm
    points: list[TunedPoint]
    """The grid or the draws, best first."""

    @property
    def has_ended(self) -> bool:
        """Whether all its runs have ended; until then no point is the best."""
        return all(tuned.has_ended for tuned in self.points)

    @property
    def best(self) -> GridPoint | None:
        """The point to measure. None until all runs have ended, or if every point failed."""
        best = self.points[0]
        return best.point if self.has_ended and best.loss < math.inf else None

    @property
    def edges(self) -> list[str]:
        """Sentences on settings whose best value is the largest or smallest that was tried.

        In a grid only points that differ in nothing else count. A value in the outermost 5 % of its
        range is at the edge too.
        """
        if self.best is None:
            return []
        ranges = {search_range.name: search_range for search_range in self.arm.ranges}
        edges = []
        for key, value in self.best.shown.items():
            numbers = self._numbers_tried(key)
            if len(numbers) < 2:
                continue
            if value == min(numbers):
                edges.append(f"{key} {value:g} is the smallest of {len(numbers)}")
            elif value == max(numbers):
                edges.append(f"{key} {value:g} is the largest of {len(numbers)}")
            elif key in ranges and ranges[key].is_at_edge(value):
                edges.append(f"{key} {value:g} is in the outermost 5 % of {ranges[key].label}")
        return edges

    def _numbers_tried(self, key: str) -> set[Any]:
        """The numbers of a setting that may be compared with its best.

        No two draws differ in one setting alone, so of draws all count.
        """
        best = self.points[0].point.shown
        numbers = set()
        for point in self.arm.points:
            value = point.shown.get(key)
            is_comparable = self.arm.ranges or point.shown == best | {key: value}
            if is_comparable and is_number(value):
                numbers.add(value)
        return numbers


def read_tunings(study: Study, output: Path) -> list[Tuning]:
    """Read the tuning of each arm under `output` so far; a point that failed comes last."""
    tunings = []
    for arm in study.arms:
        if arm.is_tuned:
            points = [_read_tuned_point(study, arm, point, output) for point in arm.points]
            points.sort(key=lambda tuned: tuned.loss)
            tunings.append(Tuning(arm, points))
    return tunings


def _read_tuned_point(study: Study, arm: Arm, point: GridPoint, output: Path) -> TunedPoint:
    states = []
    losses = []
    for seed in study.tuning_seeds:
        folder = output / PlannedRun(arm, point, seed).name
        state = read_state(folder)
        states.append(state)
        if state.status == "finished":
            run = load_run(folder)
            if len(run.curve):
                losses.append(run.final_loss)
    loss = sum(losses) / len(losses) if len(losses) == len(states) else math.inf
    return TunedPoint(point, loss, tuple(states))


def select_points(study: Study, tunings: list[Tuning]) -> dict[str, GridPoint]:
    """Select the point to measure of each arm, by arm name.

    Arms whose tuning has not ended, or failed everywhere, are left out.
    """
    selected = {arm.name: arm.points[0] for arm in study.arms if not arm.is_tuned}
    for tuning in tunings:
        if tuning.best is not None:
            selected[tuning.arm.name] = tuning.best
    return selected


def read_selection(study: Study, output: Path) -> dict[str, GridPoint]:
    """Read the tunings under `output` so far, and select the points, see `select_points`."""
    return select_points(study, read_tunings(study, output))


def plan_runs(study: Study, selected: dict[str, GridPoint]) -> list[PlannedRun]:
    """The runs of all phases; those that measure as far as their points are selected."""
    return [
        *study.tuning_runs(),
        *study.measuring_runs(selected),
        *study.annealed_runs(selected),
    ]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


RUN_VALUES = ("parameters", "tokens", "tokens_per_parameter", "flops")
"""Values of every `MeasuredArm`, besides its settings."""


class MeasuredArm(NamedTuple):
    """A measured arm as a point in a plot."""

    arm: Arm
    values: dict[str, Any]
    """Settings by short name, and `RUN_VALUES`; `flops` are 6·parameters·tokens."""
    losses: tuple[float, ...]
    """Final losses, in nats per token."""
    failed: int
    """Seeds that have ended without a loss."""

    @property
    def summary(self) -> Summary:
        """The losses, None for each failed seed."""
        return Summary([*self.losses, *[None] * self.failed])

    def number(self, name: str) -> float:
        """A value as a number. UserError if the runs have not recorded it."""
        if name not in self.values:
            raise UserError(f"the runs of arm '{self.arm.name}' have no {name}: leave it out")
        return float(self.values[name])


class RunResult(NamedTuple):
    """A planned run with its state, and the content of its folder."""

    planned: PlannedRun
    state: State
    run: Run | None
    """None if it has not started."""


@dataclass(frozen=True, eq=False)
class StudyResults:
    """The content of a study's run folders."""

    study: Study
    output: Path
    command: str
    """The command line that the user typed."""
    tunings: list[Tuning]
    selected: dict[str, GridPoint]
    """The point to measure, by arm name."""
    runs: list[RunResult]

    def runs_of(self, arm: Arm) -> tuple[Run, ...]:
        """The arm's runs on the seeds that measure, in any state."""
        measuring_runs = self.study.measuring_runs(self.selected)
        names = {planned.name for planned in measuring_runs if planned.arm is arm}
        runs = []
        for planned, _, run in self.runs:
            if run is not None and planned.name in names:
                runs.append(run)
        return tuple(runs)

    def unfinished_steps(self, arm: Arm) -> str:
        """`its tuning`, or the unfinished measuring seeds, such as `seed=2, seed=3`; or empty."""
        for tuning in self.tunings:
            if tuning.arm is arm and not tuning.has_ended:
                return "its tuning"
        unfinished = []
        for planned, state, _ in self.runs:
            if planned.arm is arm and not state.has_ended:
                unfinished.append(planned.label)
        return ", ".join(unfinished)

    def group(self, arm: Arm) -> Group | None:
        """The measured runs as a group. None if none can be compared yet."""
        runs = tuple(run for run in self.runs_of(arm) if run.config)
        for run in runs:
            # A run that failed early has not recorded its data, and cannot be compared.
            if run.comparable:
                return Group(arm.title, runs, learned_settings(run))
        return None

    @cached_property
    def comparisons(self) -> list[tuple[PlannedComparison, Comparison | None]]:
        """The study's comparisons, made as by `anlit compare` with arms as groups.

        None if no run of the baseline can be compared.
        """
        comparisons = []
        for number, planned in enumerate(self.study.comparisons, 1):
            comparison = self._compare(planned, f"{number}-")
            comparisons.append((planned, comparison))
        return comparisons

    def _compare(self, planned: PlannedComparison, file_prefix: str) -> Comparison | None:
        baseline = None
        groups: list[Group] = []
        runs: list[Run] = []
        for arm in planned.arms:
            group = self.group(arm)
            if group is not None:
                groups.append(group)
                runs += group.runs
                baseline = group if arm is planned.baseline else baseline
        if baseline is None:
            return None
        return compare_groups(groups, baseline, runs, self.output, self.command, file_prefix)

    @property
    def made_comparisons(self) -> list[Comparison]:
        """The comparisons whose baseline has a run that can be compared."""
        return [comparison for _, comparison in self.comparisons if comparison is not None]

    def measured_arms(self) -> list[MeasuredArm]:
        """The arms whose point is selected, with their losses so far."""
        measured = []
        for arm in self.study.arms:
            if arm.name in self.selected:
                runs = self.runs_of(arm)
                complete_runs = [run for run in runs if run.complete]
                settings = arm.varied.shown | self.selected[arm.name].shown
                values = settings | (_run_values(complete_runs[0]) if complete_runs else {})
                losses = tuple(run.final_loss for run in complete_runs)
                failed = sum(run.lost for run in runs)
                measured.append(MeasuredArm(arm, values, losses, failed))
        return measured


def _run_values(run: Run) -> dict[str, float]:
    """The `RUN_VALUES` of a run; only tokens if its record has no number of parameters."""
    tokens = float(run.curve.tokens[-1])
    values = {"tokens": tokens}
    if run.parameters:
        values["parameters"] = run.parameters
        values["tokens_per_parameter"] = tokens / run.parameters
        values["flops"] = 6.0 * run.parameters * tokens
    return values


def read_results(study: Study, output: Path, command: str = "") -> StudyResults:
    """Read every run folder that the study has so far."""
    tunings = read_tunings(study, output)
    selected = select_points(study, tunings)
    planned_by_name = {planned.name: planned for planned in plan_runs(study, selected)}
    runs = []
    for name, planned in planned_by_name.items():
        state = read_state(output / name)
        run = load_run(output / name) if state.status != "pending" else None
        if run is not None and state.status == "failed":
            run = _as_failed(run, planned, state)
        runs.append(RunResult(planned, state, run))
    return StudyResults(study, output, command, tunings, selected, runs)


def _as_failed(run: Run, planned: PlannedRun, state: State) -> Run:
    """The run with failure and configuration.

    A killed run has not recorded that it failed. A run that ended early has no config.yaml.
    """
    failure = {"status": "failed", "error": run.record.get("error") or state.reason}
    config = run.config or merge_configuration(planned)
    return replace(run, config=config, record=run.record | failure)
