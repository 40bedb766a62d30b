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

    point: Setting
    loss: float
    states: tuple[State, ...]


@dataclass(frozen=True, eq=False)
class Tuning:
    """The points of an arm's grid, best first; `edges` names settings whose best value is at an end of the grid."""

    arm: Arm
    tried: tuple[GridPoint, ...]
    edges: tuple[str, ...]

    @property
    def best(self) -> GridPoint:
        return self.tried[0]


def tune(study: Study, output: Path) -> list[Tuning]:
    """The tuning of each arm under `output`, as far as it is; a point that failed comes last."""
    found = []
    for arm in study.arms:
        if not arm.is_tuned:
            continue
        tried = []
        for point in arm.points:
            folders = [output / Trial(arm, point, seed).name for seed in study.tuning_seeds]
            states = tuple(state_of(folder) for folder in folders)
            tried.append(GridPoint(point, fmean(final_loss(folder) for folder in folders), states))
        tried.sort(key=lambda one: one.loss)
        edges = edges_of([one.point for one in tried], tried[0].point) if tried[0].loss < float("inf") else []
        found.append(Tuning(arm, tuple(tried), tuple(edges)))
    return found


def select(study: Study, output: Path) -> dict[str, Setting]:
    """Arm's name → the point to measure. Arms whose tuning has not ended, or failed everywhere, are left out."""
    selected = {arm.name: arm.points[0] for arm in study.arms if not arm.is_tuned}
    for tuning in tune(study, output):
        ended = all(state.status in ("finished", "failed") for one in tuning.tried for state in one.states)
        if ended and tuning.best.loss < float("inf"):
            selected[tuning.arm.name] = tuning.best.point
    return selected


def edges_of(points: list[Setting], best: Setting) -> list[str]:
    """Settings of `best` whose value is the largest or smallest of several.

    Only points that share all other settings with `best` are compared, because only these bound it. A point that leaves
    the setting at its default has no value to compare.
    """
    found = []
    for key, value in best.shown.items():
        rest = _without(best, key)
        line = sorted({one.shown[key] for one in points if key in one.shown and _without(one, key) == rest}, key=_order)
        numbers = [number for number in line if isinstance(number, int | float) and not isinstance(number, bool)]
        if len(numbers) > 1 and value in (numbers[0], numbers[-1]):
            end = "smallest" if value == numbers[0] else "largest"
            unset = " that were set; the default was tried too" if any(one.shown == rest for one in points) else ""
            found.append(f"{key} {value:g} is the {end} of {len(numbers)}{unset}")
    return found


def require_selection(study: Study, selected: dict[str, Setting]) -> None:
    """Raises:
    UserError: no arm at all has a setting that can be measured.
    """
    if not selected:
        raise UserError(f"none of the tuning runs of {study.path} succeeded: see fit.log in the run folders")


def _without(choice: Setting, key: str) -> dict[str, Any]:
    return {name: value for name, value in choice.shown.items() if name != key}


def _order(value: Any) -> tuple[bool, Any]:
    number = isinstance(value, int | float)
    return (not number, value if number else str(value))
