"""The section `convergence`: the study's comparisons, each with its notes and picture."""

from typing import Any

from anlit.compare.comparison import Comparison
from anlit.compare.comparison_report import section
from anlit.compare.plots import plot_convergence
from anlit.reporting.page import listed
from anlit.study.plan import PlannedComparison
from anlit.study.results import StudyResults

NOT_COMPARED = "no run can be compared, see Failures."
WAITS_FOR = "waits for "


def convergence(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """The comparisons in Markdown. It has no options."""
    paragraphs: list[str] = []
    for number, (planned, comparison) in enumerate(results.comparisons):
        paragraphs.append(f"## {planned.title}")
        if results.study.annealing is not None:
            paragraphs.append("The stable runs, with losses at their peak rate.")
        missing = _missing_arms(results, planned)
        if comparison is None:
            baseline = planned.baseline.title
            paragraphs.append(
                f"The baseline, {baseline}, has no finished run yet, so nothing is compared."
            )
            paragraphs.append("\n".join(missing))
        else:
            paragraphs += compared(comparison, missing, is_explained=number > 0)
    return paragraphs


def _missing_arms(results: StudyResults, planned: PlannedComparison) -> list[str]:
    """Lines on the arms of a comparison that have not ended, or cannot be compared."""
    lines = []
    for arm in planned.arms:
        unfinished = results.unfinished_steps(arm)
        if unfinished:
            lines.append(f"- {arm.title}: {WAITS_FOR}{unfinished}.")
        elif results.group(arm) is None:
            lines.append(f"- {arm.title}: {NOT_COMPARED}")
    return lines


def is_missing_arm(line: str) -> bool:
    """Whether a line of a written page is on an arm that is not compared."""
    return line.endswith(NOT_COMPARED) or f": {WAITS_FOR}" in line


def compared(comparison: Comparison, missing: list[str], is_explained: bool) -> list[str]:
    """Draw a comparison; returns its Markdown with notes and the lines on missing arms.

    `is_explained`: whether an earlier comparison of the page explains the columns.
    """
    plot_convergence(comparison)
    notes = filter(None, [listed(comparison.notes), *missing])
    return [*section(comparison, is_explained), "\n".join(notes)]
