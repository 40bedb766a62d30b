"""The section `tuning`: each arm's best point, and all points.

Every report has it.
"""

import math
from itertools import chain
from typing import Any

from anlit.reporting.table import NONE, markdown_table
from anlit.reporting.text import count_of, literal
from anlit.study.fairness import unequal_tuning
from anlit.study.plan import Study
from anlit.study.results import StudyResults, Tuning, is_number
from anlit.study.sections.draws import draws

TUNING_COLUMNS = (
    "arm",
    "runs done",
    "failed",
    "best setting",
    "its loss",
    "second best",
)


def tuning(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """The tuning in Markdown: the best points, grids that were too narrow, and points with losses.

    It has no options.
    """
    tunings = results.tunings
    if not tunings:
        return []
    seeds = [seed.name for seed in results.study.tuning_seeds]
    n_seeds = count_of(len(seeds), "seed")
    rows = [_best_row(arm_tuning) for arm_tuning in tunings]
    point_rows = []
    for arm_tuning in tunings:
        point_rows += _point_rows(arm_tuning)
    noun = "grid" if results.study.search is None else "range"
    return [
        "## Tuning",
        f"Tuning budget: {_budget(results.study)}, each trained on {n_seeds} ({', '.join(seeds)}) "
        "that the measurement does not use, in full length. The best by final validation loss "
        f"(nats per token) is measured. A best value at the edge of its {noun} means that a wider "
        f"{noun} might find a better one.",
        markdown_table([*TUNING_COLUMNS, f"edge of the {noun}"], rows),
        *draws(results),
        "## Tuning, all settings",
        markdown_table(["arm", "setting", "validation loss", "state"], point_rows, left=(0, 1, 3)),
    ]


def _budget(study: Study) -> str:
    """How many settings were tried for each arm, with a warning if arms differ."""
    counts = unequal_tuning(study)
    if counts:
        return f"UNEQUAL, settings tried: {literal(counts)}"
    return f"{len(study.arms[0].points)} settings for each arm"


def _best_row(arm_tuning: Tuning) -> list[str]:
    """The columns of TUNING_COLUMNS for an arm."""
    best, second, *_ = arm_tuning.points
    states = list(chain.from_iterable(tuned.states for tuned in arm_tuning.points))
    n_ended = sum(state.has_ended for state in states)
    n_failed = sum(state.status == "failed" for state in states)
    return [
        arm_tuning.arm.title,
        f"{n_ended} of {len(states)}",
        str(n_failed),
        _best_label(arm_tuning),
        _loss(best.loss),
        _loss(second.loss),
        _edge(arm_tuning),
    ]


def _best_label(arm_tuning: Tuning) -> str:
    """The best setting; before all runs have ended, the best so far."""
    best = arm_tuning.points[0]
    if arm_tuning.best is not None:
        return best.point.label
    return NONE if best.loss == math.inf else f"so far {best.point.label}"


def _edge(arm_tuning: Tuning) -> str:
    """Which best values lie at the edge of what was tried; `NONE` if no number was tuned."""
    if arm_tuning.edges:
        return "; ".join(arm_tuning.edges)
    if arm_tuning.best is None or not any(map(is_number, arm_tuning.best.shown.values())):
        return NONE
    return "inside the ranges" if arm_tuning.arm.ranges else "inside the grid"


def _point_rows(arm_tuning: Tuning) -> list[list[str]]:
    """A row for each point: arm, setting, loss, states of runs."""
    rows = []
    for point, loss, states in arm_tuning.points:
        texts = []
        for state in states:
            texts.append(literal(f"{state.status} {state.reason}".strip()))
        state_text = ", ".join(texts)
        rows.append([arm_tuning.arm.title, point.label, _loss(loss), state_text])
    return rows


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else NONE
