"""The section `trend`: the loss, or the best value of a setting, over another value."""

import itertools
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from anlit.compare.statistics import MEANING_OF_SD, Interval, Summary, mean_sd, power_law
from anlit.reporting.figure import COLUMN_WIDTH, DASHES, legend_below, line_styles, save, style
from anlit.reporting.table import NONE, markdown_table
from anlit.reporting.text import minus, short_number
from anlit.study.results import StudyResults
from anlit.study.sections.axes import (
    BARS_TITLE,
    UNITS,
    Lines,
    Point,
    display_name,
    draw_lines,
    set_scale,
)
from anlit.study.sections.tuned_losses import tuned_losses

PowerLaw = tuple[float, Interval]
"""Constant, and exponent with its interval."""


def trend(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """A figure and a table of a value over another.

    Options: `over`, and `value` (default: loss), names of settings or `RUN_VALUES`; `arms`.
    """
    value = options.get("value", "loss")
    over = options["over"]
    arms = options.get("arms")
    lines: dict[str, list[Point]] = {}
    for measured in results.measured_arms():
        if measured.losses and measured.arm.is_named_in(arms):
            y = measured.summary if value == "loss" else Summary([measured.number(value)])
            title = results.study.title_of(measured.arm.base)
            lines.setdefault(title, []).append((measured.number(over), y))
    for points in lines.values():
        points.sort(key=itemgetter(0))
    quantity = "Loss" if value == "loss" else f"Best {display_name(value)}"
    title = f"## {quantity} over {display_name(over)}"
    if not lines:
        return [title, "No run has finished yet."]
    laws = {} if value == "loss" else _fit_laws(lines)
    path = results.output / f"trend-{value}-{over}.png"
    draw_trend(lines, over, value, path, laws)
    paragraphs = [title, f"![{value} over {over}]({path.name})"]
    if value == "loss":
        head = ["arm", display_name(over), "validation loss (nats/token)"]
        return [*paragraphs, MEANING_OF_SD, markdown_table(head, _loss_rows(lines))]
    name = display_name(value).capitalize()
    explanation = (
        f"{name} = a · {display_name(over)}^b, fitted over the logarithms, by the grids' steps. "
        "A power law needs three points, and none at 0."
    )
    head = ["arm", "points", "exponent b", "95 % interval"]
    table = markdown_table(head, _law_rows(lines, laws))
    return [*paragraphs, explanation, table, *tuned_losses(results, value, over, arms)]


def _fit_laws(lines: Lines) -> dict[str, PowerLaw]:
    """The law of each label. None through fewer than three points, or a point at 0."""
    laws = {}
    for label, points in lines.items():
        xs = [x for x, _ in points]
        ys = [y.mean or 0.0 for _, y in points]
        law = power_law(xs, ys) if min(*xs, *ys) > 0 else None
        if law:
            laws[label] = law
    return laws


def _loss_rows(lines: Lines) -> list[list[str]]:
    rows = []
    for label, points in lines.items():
        for x, y in points:
            rows.append([label, short_number(x), mean_sd(y, 4)])
    return rows


def _law_rows(lines: Lines, laws: dict[str, PowerLaw]) -> list[list[str]]:
    rows = []
    for label, (_, (exponent, low, high)) in laws.items():
        interval = minus(f"{low:.2f} … {high:.2f}") if low < high else NONE
        rows.append([label, str(len(lines[label])), minus(f"{exponent:.2f}"), interval])
    return rows


def draw_trend(
    lines: Lines, over: str, value: str, path: Path, laws: Mapping[str, PowerLaw]
) -> None:
    """Draw the points, joined by lines or with their fitted power law. Axes as in `set_scale`."""
    styles = line_styles(list(lines))
    all_points = list(itertools.chain.from_iterable(lines.values()))
    all_x = sorted(x for x, _ in all_points)
    with style():
        figure, axes = plt.subplots(figsize=(COLUMN_WIDTH, 2.7))
        has_bars = draw_lines(axes, lines, styles, not_joined=laws)
        for i, (label, (constant, exponent)) in enumerate(laws.items()):
            first, *_, last = sorted(x for x, _ in lines[label])
            fine_x = np.geomspace(first, last, 100)
            law = constant * fine_x**exponent.median
            # Laws may coincide: their dashes keep them apart.
            law_dash = DASHES[i % len(DASHES)]
            axes.plot(fine_x, law, linestyle=law_dash, color=styles[label].colour, linewidth=1)
        set_scale(axes.xaxis, all_x)
        if value != "loss":
            values = [y.mean or 0.0 for _, y in all_points]
            set_scale(axes.yaxis, values)
            if min(values) > 0:
                axes.set_ylim(min(values) / 1.3, max(values) * 1.3)
        axes.set_xlabel(UNITS.get(over, display_name(over)))
        axes.set_ylabel(UNITS.get(value, display_name(value)))
        handles, _ = axes.get_legend_handles_labels()
        legend_below(figure, handles, columns=3, title=BARS_TITLE if has_bars else None)
        save(figure, path)
