"""A picture of a tuning: the lowest loss over the values of a setting that were tried."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from anlit.reporting.figure import INK, LineStyle, legend_below, panels, save, style
from anlit.study.results import Tuning
from anlit.study.sections.axes import UNITS, display_name, loss_range, set_scale, with_margin

LossByValue = dict[float, float]
"""Value of the setting → lowest loss with it."""


class Panel(NamedTuple):
    """The losses over one setting."""

    title: str
    setting: str
    curves: dict[str, LossByValue]
    """The curve of each label."""
    ticks: Sequence[float]
    """Ticks of a logarithmic axis; [] for a linear axis."""


def curve_of(tuning: Tuning, setting: str) -> LossByValue:
    """The lowest loss at each value, over all other tuned settings. Failed points are left out."""
    curve: LossByValue = {}
    for tuned in tuning.points:  # best first
        if setting in tuned.point.shown and math.isfinite(tuned.loss):
            curve.setdefault(float(tuned.point.shown[setting]), tuned.loss)
    return dict(sorted(curve.items()))


def draw_losses(shown: Sequence[Panel], styles: Mapping[str, LineStyle], path: Path) -> None:
    """Draw the panels with one axis of losses, and a ring at the best value of each curve.

    Losses far above the best are at the upper end of the axis.
    """
    losses: list[float] = []
    for panel in shown:
        for curve in panel.curves.values():
            losses += curve.values()
    best, top = loss_range(losses)
    with style():
        figure, all_axes = panels(len(shown), columns=2, height=1.9)
        for axes, panel in zip(all_axes, shown, strict=True):
            for label, curve in panel.curves.items():
                _draw_curve(axes, curve, top, styles[label])
            if panel.ticks:
                set_scale(axes.xaxis, panel.ticks)
            axes.set(title=panel.title, ylim=with_margin(best, top), ylabel=UNITS["loss"])
            axes.set_xlabel(UNITS.get(panel.setting, display_name(panel.setting)))
        handles = []
        for label, look in styles.items():
            handles.append(Line2D([], [], label=label, **_line_arguments(look)))
        legend_below(figure, handles, columns=4)
        save(figure, path)


def _line_arguments(look: LineStyle) -> dict[str, Any]:
    """The look of a line as arguments of matplotlib."""
    return {
        "color": look.colour,
        "marker": look.marker,
        "markersize": 4,
        "linestyle": look.dash,
    }


def _draw_curve(axes: Axes, curve: LossByValue, top: float, look: LineStyle) -> None:
    heights = [min(loss, top) for loss in curve.values()]
    axes.plot(list(curve), heights, linewidth=1.2, clip_on=False, **_line_arguments(look))
    best = min(curve, key=curve.__getitem__)
    ring: dict[str, Any] = {"marker": "o", "markersize": 9, "fillstyle": "none", "color": INK}
    axes.plot(best, min(curve[best], top), clip_on=False, **ring)
