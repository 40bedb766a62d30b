"""The picture of a trend of tuned values: the loss over the values that were tried.

A panel for each arm, a curve for each value of `over`. Where the best value stays, the curves of an
arm have their lowest points above each other.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from anlit.reporting.figure import COLOUR_MAP, INK, MARKERS, legend_below, panels, save, style
from anlit.reporting.text import short_number
from anlit.study.results import StudyResults, Tuning
from anlit.study.sections.axes import UNITS, display_name, loss_range, set_scale, with_margin

Curve = dict[float, float]
"""Value of the tuned setting → lowest loss with it."""
Panels = Mapping[str, Mapping[float, Curve]]
"""Title of an arm → value of `over` → curve."""
Colour = tuple[float, float, float, float]
DARKEST = 0.85
"""The share of the colour map that the curves use. The rest is too pale on white."""


def tuned_losses(
    results: StudyResults, value: str, over: str, arms: Sequence[str] | None
) -> list[str]:
    """The picture in Markdown; empty if no value was tuned."""
    curves = _read_curves(results, value, over, arms)
    if not curves:
        return []
    path = results.output / f"losses-{value}-{over}.png"
    draw_tuned_losses(curves, value, over, path)
    caption = (
        f"Losses of the tuning: a curve for each {display_name(over)}, a ring at its best. "
        "Losses far above the best are at the upper end."
    )
    return [caption, f"![loss over {display_name(value)}]({path.name})"]


def _read_curves(
    results: StudyResults, value: str, over: str, arms: Sequence[str] | None
) -> dict[str, dict[float, Curve]]:
    numbers = {}
    for measured in results.measured_arms():
        if measured.losses and measured.arm.is_named_in(arms):
            numbers[measured.arm.name] = measured.number(over)
    curves: dict[str, dict[float, Curve]] = {}
    for tuning in results.tunings:
        curve = _curve_of(tuning, value)
        if tuning.arm.name in numbers and len(curve) > 1:
            title = results.study.title_of(tuning.arm.base)
            curves.setdefault(title, {})[numbers[tuning.arm.name]] = curve
    return curves


def _curve_of(tuning: Tuning, value: str) -> Curve:
    """The lowest loss at each value, over all other tuned settings. Failed points are left out."""
    curve: Curve = {}
    for tuned in tuning.points:  # best first
        if value in tuned.point.shown and math.isfinite(tuned.loss):
            curve.setdefault(float(tuned.point.shown[value]), tuned.loss)
    return dict(sorted(curve.items()))


def draw_tuned_losses(curves: Panels, value: str, over: str, path: Path) -> None:
    """Draw a panel for each arm. All have the same axis of losses."""
    tried: set[float] = set()
    losses: list[float] = []
    overs: set[float] = set()
    for arm_curves in curves.values():
        overs |= arm_curves.keys()
        for curve in arm_curves.values():
            tried |= curve.keys()
            losses += curve.values()
    best, top = loss_range(losses)
    looks = _looks(sorted(overs))
    with style(8):
        figure, axes = panels(len(curves), columns=2, height=1.9)
        for ax, (title, arm_curves) in zip(axes, curves.items(), strict=True):
            for number, curve in sorted(arm_curves.items()):
                _draw_curve(ax, curve, top, *looks[number])
            ax.set_title(title)
            set_scale(ax.xaxis, sorted(tried))
            ax.set_ylim(*with_margin(best, top))
            ax.set_xlabel(UNITS.get(value, display_name(value)))
            ax.set_ylabel(UNITS["loss"])
        handles = []
        for number, (colour, marker) in looks.items():
            label = f"{display_name(over)} {short_number(number)}"
            handles.append(Line2D([], [], color=colour, marker=marker, markersize=4, label=label))
        legend_below(figure, handles, columns=4)
        save(figure, path)


def _looks(numbers: Sequence[float]) -> dict[float, tuple[Colour, str]]:
    """Colour and marker of each value of `over`, from dark to pale."""
    colours = matplotlib.colormaps[COLOUR_MAP]
    looks: dict[float, tuple[Colour, str]] = {}
    for i, number in enumerate(numbers):
        share = DARKEST * i / max(len(numbers) - 1, 1)
        looks[number] = (colours(share), MARKERS[i % len(MARKERS)])
    return looks


def _draw_curve(ax: Axes, curve: Curve, top: float, colour: Colour, marker: str) -> None:
    values = list(curve)
    shown = [min(loss, top) for loss in curve.values()]
    ax.plot(values, shown, color=colour, marker=marker, markersize=4, linewidth=1.2)
    best = min(curve, key=curve.__getitem__)
    ring: dict[str, Any] = {"marker": "o", "markersize": 9, "fillstyle": "none", "color": INK}
    ax.plot(best, min(curve[best], top), **ring)
