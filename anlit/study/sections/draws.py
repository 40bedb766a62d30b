"""The draws in the section `tuning`: their ranges, and a picture of the loss over each range."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from anlit.reporting.figure import INK, LineStyle, legend_below, line_styles, panels, save, style
from anlit.reporting.page import listed
from anlit.reporting.text import literal
from anlit.study.results import StudyResults, Tuning
from anlit.study.search import SearchRange
from anlit.study.sections.axes import UNITS, display_name, loss_range, set_ticks, with_margin

PICTURE = "tuning.png"
BEST: dict[str, Any] = {"marker": "o", "markersize": 9, "fillstyle": "none", "clip_on": False}
ABOVE: dict[str, Any] = {"marker": r"$\uparrow$", "markersize": 6, "clip_on": False}
FAILED: dict[str, Any] = {"marker": "x", "markersize": 5, "clip_on": False}


def draws(results: StudyResults) -> list[str]:
    """The ranges and the picture in Markdown; empty without `search`."""
    search = results.study.search
    if search is None:
        return []
    tunings = [arm_tuning for arm_tuning in results.tunings if arm_tuning.arm.ranges]
    paragraphs = [
        f"Search: {search.label}. A draw follows from the lines of `tune`, the seed and its "
        "number, so arms with the same lines have the same draws. The edge of a range is its "
        "outermost 5 %, or a value beyond which no draw lies.",
        _spaces(results.tunings),
    ]
    if any(math.isfinite(arm_tuning.points[0].loss) for arm_tuning in tunings):
        draw_losses(tunings, results.output / PICTURE)
        paragraphs.append(f"![loss over each range]({PICTURE})")
    return paragraphs


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


def draw_losses(tunings: Sequence[Tuning], path: Path) -> None:
    """Draw the loss of each draw over each range, a panel for each setting.

    Draws far above the best are at the top of the axis, and so are failed draws.
    """
    names: dict[str, None] = {}
    for arm_tuning in tunings:
        names |= dict.fromkeys(search_range.name for search_range in arm_tuning.arm.ranges)
    styles = line_styles([arm_tuning.arm.title for arm_tuning in tunings])
    losses = []
    for arm_tuning in tunings:
        losses += [tuned.loss for tuned in arm_tuning.points if math.isfinite(tuned.loss)]
    best, top = loss_range(losses)
    with style(8):
        figure, axes = panels(len(names), columns=2)
        for ax, name in zip(axes, names, strict=True):
            for arm_tuning in tunings:
                _draw_arm(ax, name, arm_tuning, styles[arm_tuning.arm.title], top)
            _scale_axes(ax, name, tunings, best, top)
        legend_below(figure, _legend_entries(styles), columns=3)
        save(figure, path)


def _legend_entries(styles: Mapping[str, LineStyle]) -> list[Line2D]:
    marks: dict[str, dict[str, Any]] = {}
    for title, look in styles.items():
        marks[title] = {"color": look.colour, "marker": look.marker, "markersize": 4}
    marks |= {"best of its arm": BEST, "higher loss": ABOVE, "failed": FAILED}
    entries = []
    for label, mark in marks.items():
        entries.append(Line2D([], [], label=label, linestyle="none", **{"color": INK} | mark))
    return entries


def _draw_arm(ax: Axes, name: str, arm_tuning: Tuning, look: LineStyle, top: float) -> None:
    """Draw the draws of an arm over one of its ranges, if it has that range."""
    if name not in {search_range.name for search_range in arm_tuning.arm.ranges}:
        return
    for tuned in arm_tuning.points:
        x = tuned.point.shown[name]
        mark: dict[str, Any] = {"marker": look.marker, "markersize": 3.5, "clip_on": False}
        if tuned.loss > top:
            mark = ABOVE if math.isfinite(tuned.loss) else FAILED
        if tuned.has_ended:
            ax.plot(x, min(tuned.loss, top), color=look.colour, alpha=0.8, **mark)
    best = arm_tuning.points[0]
    if math.isfinite(best.loss):
        ax.plot(best.point.shown[name], min(best.loss, top), color=look.colour, **BEST)


def _scale_axes(ax: Axes, name: str, tunings: Sequence[Tuning], best: float, top: float) -> None:
    """Show the whole ranges of a setting, and the losses up to `top`."""
    ranges: list[SearchRange] = []
    for arm_tuning in tunings:
        ranges += [candidate for candidate in arm_tuning.arm.ranges if candidate.name == name]
    low = min(search_range.low for search_range in ranges)
    high = max(search_range.high for search_range in ranges)
    if all(search_range.is_log for search_range in ranges):
        ax.set_xscale("log")
        set_ticks(ax.xaxis, np.geomspace(low, high, 3).tolist())
    ax.set_xlim(low, high)
    ax.set_ylim(*with_margin(best, top))
    ax.set_xlabel(UNITS.get(name, display_name(name)))
    ax.set_ylabel(UNITS["loss"])
