"""The draws in the section `tuning`: their ranges, and a picture of the loss over each range."""

from collections.abc import Sequence

import numpy as np

from anlit.reporting.figure import line_styles
from anlit.reporting.page import listed
from anlit.reporting.text import literal
from anlit.study.results import StudyResults, Tuning
from anlit.study.sections.tried_losses import Panel, curve_of, draw_losses

PICTURE = "tuning.png"


def draws(results: StudyResults) -> list[str]:
    """The ranges and the picture in Markdown; empty without `search`."""
    search = results.study.search
    if search is None:
        return []
    paragraphs = [
        f"Search: {search.label}. A draw follows from the lines of `tune`, the seed and its "
        "number, so arms with the same lines have the same draws. The edge of a range is its "
        "outermost 5 %, or a value beyond which no draw lies.",
        _spaces(results.tunings),
    ]
    shown = _panels(results.tunings)
    if shown:
        titles: dict[str, None] = {}
        for panel in shown:
            titles |= dict.fromkeys(panel.curves)
        styles = {}
        for title, look in line_styles(list(titles)).items():
            styles[title] = look._replace(dash="none")
        draw_losses(shown, styles, results.output / PICTURE)
        caption = "A ring is the best of its arm. Losses far above it are at the upper end."
        paragraphs += [f"![loss over each range]({PICTURE})", caption]
    return paragraphs


def _panels(tunings: Sequence[Tuning]) -> list[Panel]:
    """A panel for each range, with the arms that have finished draws from it."""
    shown: dict[str, Panel] = {}
    for tuning in tunings:
        for drawn in tuning.arm.ranges:
            curve = curve_of(tuning, drawn.name)
            if curve:
                ticks = np.geomspace(drawn.low, drawn.high, 3).tolist() if drawn.is_log else []
                panel = shown.setdefault(drawn.name, Panel("", drawn.name, {}, ticks))
                panel.curves[tuning.arm.title] = curve
    return list(shown.values())


def _spaces(tunings: Sequence[Tuning]) -> str:
    """What the draws of each arm are drawn from, in Markdown."""
    titles_by_space: dict[str, list[str]] = {}
    for arm_tuning in tunings:
        arm = arm_tuning.arm
        titles_by_space.setdefault(arm.space, []).append(arm.title)
    if len(titles_by_space) == 1:
        return f"Ranges of all arms: {literal(next(iter(titles_by_space)))}."
    entries = []
    for space, titles in titles_by_space.items():
        entries.append(f"{', '.join(titles)}: {space}.")
    return f"RANGES DIFFER between arms:\n\n{listed(entries)}"
