"""The annealed runs of a study: each arm's final losses, and its speed-ups over a baseline.

The speed-up of `anlit.compare.annealed` stands beside the speed-up of `anlit.compare.statistics`,
over the same runs. There each run has the curve of its stable run until the branch.
"""

import math
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from anlit.compare.annealed import AnnealedSpeedUp, End, Trend, annealed_speed_up, trend
from anlit.compare.notes import obstacle_to_comparison
from anlit.compare.statistics import Losses, SpeedUp, speed_up
from anlit.config.batch_ramp import configured_ramp
from anlit.config.labels import mapping
from anlit.runs.folders import Curve
from anlit.runs.groups import Group
from anlit.study.plan import AnnealedRun, Arm, PlannedComparison
from anlit.study.results import RunResult, StudyResults


class AnnealedArm(NamedTuple):
    """The annealed runs of an arm, by seed and length in steps. None for a run that failed."""

    title: str
    group: Group | None
    """The stable runs. None if none can be compared yet."""
    ends: dict[Hashable, dict[int, End | None]]
    curves: dict[Hashable, dict[int, Curve | None]]
    """The curve of the stable run until the branch, and of the annealed run."""
    parameters: int | None
    lost: list[str]
    """Names of the runs without an annealed loss, each with its reason."""

    @property
    def lengths(self) -> list[int]:
        """The lengths at which a run has ended, in ascending order."""
        lengths: set[int] = set()
        return sorted(lengths.union(*self.ends.values()))

    def losses(self, length: int) -> dict[Hashable, float | None]:
        """The annealed losses at a length, by seed."""
        losses: dict[Hashable, float | None] = {}
        for seed, by_length in self.ends.items():
            if length in by_length:
                end = by_length[length]
                losses[seed] = end.loss if end else None
        return losses

    def tokens(self, length: int) -> float:
        """Training tokens at a length. NaN if no run has ended there."""
        for by_length in self.ends.values():
            end = by_length.get(length)
            if end is not None:
                return end.tokens
        return math.nan

    def seeded_curves(self, length: int) -> list[tuple[Hashable, Curve | None]]:
        """Seeds and curves at a length, for `speed_up`."""
        curves = []
        for seed, by_length in self.curves.items():
            if length in by_length:
                curves.append((seed, by_length[length]))
        return curves


class LengthComparison(NamedTuple):
    """An arm against the baseline at a length."""

    length: int
    tokens: float
    losses: Losses
    """Annealed losses by seed."""
    baseline_losses: Losses
    annealed: AnnealedSpeedUp
    crossing: SpeedUp
    """The speed-up of the same runs by their curves."""


class ArmComparison(NamedTuple):
    """An arm against the baseline."""

    arm: AnnealedArm
    points: list[LengthComparison]
    trend: Trend | None


class AnnealedComparison(NamedTuple):
    """A comparison of the study, by annealed runs."""

    planned: PlannedComparison
    baseline: AnnealedArm
    lines: list[ArmComparison]


def annealed_comparisons(results: StudyResults) -> list[AnnealedComparison]:
    """The study's comparisons by the annealed runs that have ended."""
    comparisons = []
    for planned in results.study.comparisons:
        baseline = read_arm(results, planned.baseline)
        lines = []
        for arm in planned.arms:
            if arm is not planned.baseline:
                line = _line(results, read_arm(results, arm), baseline)
                if line.points:
                    lines.append(line)
        comparisons.append(AnnealedComparison(planned, baseline, lines))
    return comparisons


def read_arm(results: StudyResults, arm: Arm) -> AnnealedArm:
    """The annealed runs of an arm that have ended."""
    stable_runs = {result.planned.name: result for result in results.runs}
    read = AnnealedArm(arm.title, results.group(arm), {}, {}, None, [])
    for result in results.runs:
        planned = result.planned
        if planned.arm is not arm or not isinstance(planned, AnnealedRun):
            continue
        if not result.state.has_ended:
            continue
        seed = planned.seed.name
        end, curve = _end_and_curve(result, stable_runs[planned.stable.name])
        read.ends.setdefault(seed, {})[planned.max_steps] = end
        read.curves.setdefault(seed, {})[planned.max_steps] = curve
        if end is None:
            read.lost.append(f"{planned.name} ({_obstacle(result)})")
        if result.run is not None and result.run.parameters:
            read = read._replace(parameters=result.run.parameters)
    return read


def _obstacle(result: RunResult) -> str:
    """Why a run that has ended has no annealed loss, in words; "" if it has one."""
    run = result.run
    if result.state.status == "failed" or run is None:
        return "failed"
    if run.record.get("stopped_early"):
        return f"ended early, after {run.record['stopped_early']}"
    return "" if run.complete else run.state


def _end_and_curve(result: RunResult, stable_result: RunResult) -> tuple[End | None, Curve | None]:
    """The end of an annealed run, and its curve after the curve of the stable run; or None.

    Micro-batches have the same number of tokens throughout.
    """
    run = result.run
    stable = stable_result.run
    if run is None or _obstacle(result):
        return None, None
    end = End(float(run.curve.tokens[-1]), run.final_loss)
    curve = run.curve.finite()
    if stable is not None:
        assert isinstance(result.planned, AnnealedRun)
        ramp = configured_ramp(mapping(run.config.get("trainer")))
        n_micro_batches = ramp.total(result.planned.max_steps)
        share = ramp.total(result.planned.n_stable) / n_micro_batches
        before = stable.curve.finite()
        is_before = before.tokens < end.tokens * share * (1 + 1e-9)
        curve = Curve(
            np.concatenate([before.tokens[is_before], curve.tokens]),
            np.concatenate([before.seconds[is_before], curve.seconds]),
            np.concatenate([before.loss[is_before], curve.loss]),
        )
    return end, curve


def _line(results: StudyResults, arm: AnnealedArm, baseline: AnnealedArm) -> ArmComparison:
    """An arm against the baseline at the lengths at which both have ended runs."""
    annealing = results.study.annealing
    assert annealing is not None
    points: list[LengthComparison] = []
    if arm.group is not None and baseline.group is not None:
        obstacle = obstacle_to_comparison(arm.group, baseline.group)
        for length in annealing.max_steps:
            if arm.losses(length) and baseline.losses(length):
                points.append(_point(arm, baseline, length, obstacle))
    speedups = [point.annealed for point in points]
    return ArmComparison(arm, points, trend(speedups))


def _point(arm: AnnealedArm, baseline: AnnealedArm, length: int, obstacle: str) -> LengthComparison:
    annealed_ratio = annealed_speed_up(baseline.ends, arm.ends, length)
    if obstacle:
        annealed_ratio = AnnealedSpeedUp(annealed_ratio.tokens, {}, obstacle=obstacle)
    crossing = speed_up(baseline.seeded_curves(length), arm.seeded_curves(length), obstacle)
    return LengthComparison(
        length,
        arm.tokens(length),
        arm.losses(length),
        baseline.losses(length),
        annealed_ratio,
        crossing,
    )
