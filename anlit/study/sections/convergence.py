"""The section `convergence`: the study's comparisons, each with its notes and picture."""

from typing import Any

from anlit.compare.comparison import Comparison
from anlit.compare.comparison_report import section
from anlit.compare.plots import plot_convergence
from anlit.reporting.page import listed
from anlit.study.results import StudyResults


def convergence(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """The comparisons in Markdown. It has no options."""
    paragraphs: list[str] = []
    for number, (planned, comparison) in enumerate(results.comparisons):
        if results.study.annealing is None:
            paragraphs.append(f"## {planned.title}")
        else:
            paragraphs.append(f"## Stable runs: {planned.title}")
            paragraphs.append(
                "The rate of these runs has not fallen, so their losses are above annealed ones."
            )
        if comparison is None:
            baseline = planned.baseline.title
            paragraphs.append(
                f"The baseline, {baseline}, has no finished run yet, so nothing is compared."
            )
        else:
            paragraphs += compared(comparison, is_explained=number > 0)
    return paragraphs


def compared(comparison: Comparison, is_explained: bool) -> list[str]:
    """Draw a comparison; returns its Markdown with notes.

    `is_explained`: whether an earlier comparison of the page explains the columns.
    """
    plot_convergence(comparison)
    return [*section(comparison, is_explained), listed(comparison.notes)]
