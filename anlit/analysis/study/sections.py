"""What a study's report can show. A section is a function of the results and of the options in the YAML.

    convergence   {}                           each comparison: curves, losses, speed-ups, tests
    tuning        {}                           what each arm's grid found, and where it was too narrow
    trend         {value, over, arms}          loss, or the best value of a setting, over another value; a power law
    loss_gap      {baseline, each, over}       losses minus the baseline's at each point of `vary`
    scaling       {}                           L(N, D) and L(C), see `anlit.analysis.study.scaling`
    onset         {loss, after, baseline}      when each run's loss falls below a level, and the loss some tokens later
    dynamics      {arms}                       norms, steps and rotations over training, see `TrainingDynamics`
    embed         {name}                       the report of one of the study's `after` commands

`arms` names those to show (default: all).
"""

import math
from collections.abc import Callable
from typing import Any

from anlit.analysis import comparison_report
from anlit.analysis.plots import plot_convergence
from anlit.analysis.study.dynamics import dynamics
from anlit.analysis.study.loss_gap import loss_gap
from anlit.analysis.study.onset import onset
from anlit.analysis.study.plan import Study
from anlit.analysis.study.results import StudyResults
from anlit.analysis.study.scaling import scaling
from anlit.analysis.study.trend import trend
from anlit.errors import UserError
from anlit.reporting.page import listed
from anlit.reporting.table import NONE, markdown_table
from anlit.reporting.text import literal

NOT_COMPARED = "no run can be compared, see Failures."


def render(results: StudyResults) -> list[str]:
    """All sections of the study's YAML in Markdown, one after another.

    Raises:
        UserError: A section or an option is not known.
    """
    parts = []
    require_sections(results.study)
    for name, options in results.study.sections:
        try:
            parts += SECTIONS[name](results, options)
        except KeyError as error:
            raise UserError(f"the section '{name}' of {results.study.path} needs the option {error}") from error
    return parts


def require_sections(study: Study) -> None:
    """Raises:
    UserError: A section, or an arm that one names, is not known.
    """
    known = dict.fromkeys(arm.base for arm in study.arms)
    for name, options in study.sections:
        if name not in SECTIONS:
            raise UserError(f"{study.path} asks for the section '{name}': choose one of {', '.join(SECTIONS)}")
        for arm in options.get("arms") or ():
            if arm not in known:
                raise UserError(f"the section '{name}' of {study.path} names the arm '{arm}', which is none of "
                                + ", ".join(known))  # fmt: skip


def convergence(results: StudyResults, options: dict[str, Any]) -> list[str]:
    parts: list[str] = []
    explained = False
    for planned, comparison in results.comparisons:
        parts.append(f"## {planned.title}")
        if comparison is None:
            parts.append(f"The baseline, {planned.baseline.title}, has no finished run yet.")
            continue
        plot_convergence(comparison)
        missing = [f"{arm.title}: {NOT_COMPARED}" for arm in planned.arms if results.group(arm) is None]
        parts += [*comparison_report.section(comparison, explained), listed([*comparison.notes, *missing])]
        explained = True
    return parts


def winners(results: StudyResults) -> list[str]:
    """Each tuned arm's best setting, and where its grid was too narrow; a report without `tuning` has this too."""
    if not results.tunings:
        return []
    seeds = [seed.name for seed in results.study.tuning_seeds]
    counts = sorted({len(tuning.points) for tuning in results.tunings})
    equal = f"{counts[0]} settings for each arm"
    budget = equal if len(counts) == 1 else f"UNEQUAL: {counts[0]} to {counts[-1]} settings"
    rows = []
    for tuning in results.tunings:
        best, second, *_ = tuning.points
        states = [state for point in tuning.points for state in point.states]
        done, failed = sum(state.has_ended for state in states), sum(state.status == "failed" for state in states)
        known = best.loss < math.inf
        rows.append([
            tuning.arm.title, f"{done} of {len(states)}", str(failed), best.setting.words if known else NONE,
            _loss(best.loss), _loss(second.loss), "; ".join(tuning.edges) or ("inside the grid" if known else NONE),
        ])  # fmt: skip
    head = ["arm", "runs done", "failed", "best setting", "its loss", "second best", "edge of the grid"]
    return [
        "## Tuning",
        f"Tuning budget: {budget}, each trained on {len(seeds)} seed{'s' * (len(seeds) > 1)} ({', '.join(seeds)}) that "
        "the measurement does not use, in full length. The best by final validation loss (nats per token) is measured. "
        "A best value at the edge of its grid means that a wider grid might find a better one.",
        markdown_table(head, rows),
    ]


def tuning(results: StudyResults, options: dict[str, Any]) -> list[str]:
    rows = []
    for arm, point in ((tuning.arm, point) for tuning in results.tunings for point in tuning.points):
        states = ", ".join(literal(f"{state.status} {state.reason}".strip()) for state in point.states)
        rows.append([arm.title, point.setting.words, _loss(point.loss), states])
    table = markdown_table(["arm", "setting", "validation loss", "state"], rows, left=(0, 1, 3))
    return [*winners(results), "## Tuning, all settings", table] if rows else []


def embed(results: StudyResults, options: dict[str, Any]) -> list[str]:
    name = options["name"]
    twin = results.output / name / f"{name}.md"
    if not twin.is_file():
        return [f"## {name.capitalize()}", "Not measured yet."]
    lines = [f"#{line}" if line.startswith("#") else line for line in twin.read_text().splitlines()]
    return [f"## {name.capitalize()}", "\n".join(lines).replace("](", f"]({name}/")]


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else NONE


SECTIONS: dict[str, Callable[[StudyResults, dict[str, Any]], list[str]]] = {
    "convergence": convergence, "tuning": tuning, "trend": trend, "loss_gap": loss_gap, "scaling": scaling,
    "onset": onset, "dynamics": dynamics, "embed": embed,
}  # fmt: skip
