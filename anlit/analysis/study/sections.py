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
from anlit.analysis.comparison import Comparison, compare_groups
from anlit.analysis.plots import plot_convergence
from anlit.analysis.study.dynamics import dynamics
from anlit.analysis.study.loss_gap import loss_gap
from anlit.analysis.study.onset import onset
from anlit.analysis.study.plan import PlannedComparison, Study
from anlit.analysis.study.results import StudyResults
from anlit.analysis.study.scaling import scaling
from anlit.analysis.study.trend import trend
from anlit.errors import UserError
from anlit.reporting.page import listed
from anlit.reporting.table import NONE, markdown_table
from anlit.reporting.text import literal


def render(results: StudyResults) -> list[str]:
    """All sections of the study's YAML in Markdown, one after another.

    Raises:
        UserError: A section or an option is not known.
    """
    parts = []
    require_sections(results.study)
    for entry in results.study.sections:
        ((name, options),) = entry.items()
        try:
            parts += SECTIONS[name](results, options or {})
        except KeyError as error:
            raise UserError(f"the section '{name}' of {results.study.path} needs the option {error}") from error
    return parts


def require_sections(study: Study) -> None:
    """Raises:
    UserError: A section, or an arm that one names, is not known.
    """
    known = dict.fromkeys(arm.base for arm in study.arms)
    for entry in study.sections:
        for number, (name, options) in enumerate(entry.items()):
            if number or name not in SECTIONS:
                raise UserError(f"{study.path} asks for the section '{name}': choose one of {', '.join(SECTIONS)}")
            for arm in (options or {}).get("arms") or ():
                if arm not in known:
                    raise UserError(f"the section '{name}' of {study.path} names the arm '{arm}', which is none of "
                                    + ", ".join(known))  # fmt: skip


def convergence(results: StudyResults, options: dict[str, Any]) -> list[str]:
    parts: list[str] = []
    explained = False
    for number, planned in enumerate(results.study.comparisons, 1):
        parts.append(f"## {planned.title}")
        comparison = comparison_of(results, planned, f"{number}-")
        if comparison is None:
            parts.append(f"The baseline, {planned.baseline.title}, has no finished run yet.")
            continue
        plot_convergence(comparison)
        parts += comparison_report.section(comparison, explained)
        explained = True
        missing = [f"{arm.title}: no run can be compared, see Failures."
                   for arm in planned.arms if results.group(arm) is None]  # fmt: skip
        parts.append(listed([*comparison.notes, *missing]))
    return parts


def comparison_of(results: StudyResults, planned: PlannedComparison, name: str = "") -> Comparison | None:
    """A comparison of the study as `anlit compare` would make it, with the study's arms as groups."""
    groups = {arm: group for arm in planned.arms if (group := results.group(arm)) is not None}
    if planned.baseline not in groups:
        return None
    runs = [run for group in groups.values() for run in group.runs]
    baseline = groups[planned.baseline]
    return compare_groups([*groups.values()], baseline, runs, results.output, results.command, name)


def winners(results: StudyResults) -> list[str]:
    """Each tuned arm's best setting, and where its grid was too narrow; a report without `tuning` has this too."""
    if not results.tunings:
        return []
    seeds = [seed.name for seed in results.study.tuning_seeds]
    counts = sorted({len(tuning.points) for tuning in results.tunings})
    budget = f"{counts[0]} settings for each arm"
    if len(counts) > 1:
        budget = f"UNEQUAL: {counts[0]} to {counts[-1]} settings"
    rows = []
    for tuning in results.tunings:
        states = [state for point in tuning.points for state in point.states]
        done, failed = sum(state.has_ended for state in states), sum(state.status == "failed" for state in states)
        known = tuning.best.loss < math.inf
        rows.append([
            tuning.arm.title, f"{done} of {len(states)}", str(failed), tuning.best.setting.words if known else NONE,
            *(_loss(point.loss) for point in tuning.points[:2]),
            "; ".join(tuning.edges) or ("inside the grid" if known else NONE),
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
    if not rows:
        return []
    table = markdown_table(["arm", "setting", "validation loss", "state"], rows, left=(0, 1, 3))
    return [*winners(results), "## Tuning, all settings", table]


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
