"""Each arm's best setting by validation loss, and whether it is at the edge of its grid."""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from anlit.analysis.study.grids import Setting
from anlit.analysis.study.plan import Arm, Study, Trial
from anlit.analysis.study.state import State, final_loss, state_of
from anlit.errors import UserError


@dataclass(frozen=True, eq=False)
class GridPoint:
    """One point of an arm's grid: its mean final validation loss over the tuning seeds, infinite if one failed."""

    setting: Setting
    loss: float
    states: tuple[State, ...]

    @property
    def has_ended(self) -> bool:
        return all(state.has_ended for state in self.states)


@dataclass(frozen=True, eq=False)
class Tuning:
    """The points of an arm's grid, best first; `edges` names settings whose best value is at an end of the grid."""

    arm: Arm
    points: tuple[GridPoint, ...]
    edges: tuple[str, ...]

    @property
    def best(self) -> GridPoint:
        return self.points[0]


def tune(study: Study, output: Path) -> list[Tuning]:
    """The tuning of each arm under `output`, as far as it is; a point that failed comes last."""
    tunings = []
    for arm in study.arms:
        if arm.is_tuned:
            points = []
            for setting in arm.points:
                folders = [output / Trial(arm, setting, seed).name for seed in study.tuning_seeds]
                loss = fmean(final_loss(folder) for folder in folders)
                points.append(GridPoint(setting, loss, tuple(map(state_of, folders))))
            points.sort(key=lambda point: point.loss)
            known = points[0].loss < float("inf")
            edges = edges_of(list(arm.points), points[0].setting) if known else []
            tunings.append(Tuning(arm, tuple(points), tuple(edges)))
    return tunings


def select(study: Study, output: Path) -> dict[str, Setting]:
    """Arm's name → the setting to measure. Arms whose tuning has not ended, or failed everywhere, are left out."""
    selected = {arm.name: arm.points[0] for arm in study.arms if not arm.is_tuned}
    for tuning in tune(study, output):
        if all(point.has_ended for point in tuning.points) and tuning.best.loss < float("inf"):
            selected[tuning.arm.name] = tuning.best.setting
    return selected


def edges_of(settings: list[Setting], best: Setting) -> list[str]:
    """Settings of `best` whose value is the largest or smallest of several.

    Only points that share all other settings with `best` are compared, because only these bound it. A point that leaves
    the setting at its default has no value to compare.
    """
    edges = []
    for key, value in best.shown.items():
        rest = _without(best, key)
        line = {each.shown[key] for each in settings if key in each.shown and _without(each, key) == rest}
        numbers = sorted(each for each in line if isinstance(each, int | float) and not isinstance(each, bool))
        if len(numbers) > 1 and value in (numbers[0], numbers[-1]):
            end = "smallest" if value == numbers[0] else "largest"
            unset = " that were set; the default was tried too" if any(each.shown == rest for each in settings) else ""
            edges.append(f"{key} {value:g} is the {end} of {len(numbers)}{unset}")
    return edges


def require_selection(study: Study, selected: dict[str, Setting]) -> None:
    """Raises:
    UserError: no arm at all has a setting that can be measured.
    """
    if not selected:
        raise UserError(f"none of the tuning runs of {study.path} succeeded: see fit.log in the run folders")


def _without(setting: Setting, key: str) -> dict[str, Any]:
    return {name: value for name, value in setting.shown.items() if name != key}
