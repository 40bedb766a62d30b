"""The picture of a trend of tuned values: the loss over the values that were tried.

A panel for each arm, a curve for each value of `over`. Where the best value stays, the curves of an
arm have their lowest points above each other.
"""

from collections.abc import Sequence

import matplotlib

from anlit.reporting.figure import COLOUR_MAP, MARKERS, LineStyle
from anlit.reporting.text import short_number
from anlit.study.results import StudyResults
from anlit.study.sections.axes import display_name
from anlit.study.sections.tried_losses import LossByValue, Panel, curve_of, draw_losses

DARKEST = 0.85
"""The share of the colour map that the curves use. The rest is too pale on white."""


def tuned_losses(
    results: StudyResults, value: str, over: str, arms: Sequence[str] | None
) -> list[str]:
    """The picture in Markdown; empty if no value was tuned."""
    curves = _read_curves(results, value, over, arms)
    if not curves:
        return []
    labels = {}
    for number in sorted(set().union(*curves.values())):
        labels[number] = f"{display_name(over)} {short_number(number)}"
    shown = []
    for title, arm_curves in curves.items():
        ordered = {labels[number]: curve for number, curve in sorted(arm_curves.items())}
        shown.append(Panel(title, value, ordered, sorted(set().union(*ordered.values()))))
    path = results.output / f"losses-{value}-{over}.png"
    draw_losses(shown, _styles(list(labels.values())), path)
    caption = (
        f"Losses of the tuning: a curve for each {display_name(over)}, a ring at its best. "
        "Losses far above the best are at the upper end."
    )
    return [caption, f"![loss over {display_name(value)}]({path.name})"]


def _read_curves(
    results: StudyResults, value: str, over: str, arms: Sequence[str] | None
) -> dict[str, dict[float, LossByValue]]:
    """The curves of each value of `over`, by the title of an arm."""
    numbers = {}
    for measured in results.measured_arms():
        if measured.losses and measured.arm.is_named_in(arms):
            numbers[measured.arm.name] = measured.number(over)
    curves: dict[str, dict[float, LossByValue]] = {}
    for tuning in results.tunings:
        curve = curve_of(tuning, value)
        if tuning.arm.name in numbers and len(curve) > 1:
            title = results.study.title_of(tuning.arm.base)
            curves.setdefault(title, {})[numbers[tuning.arm.name]] = curve
    return curves


def _styles(labels: Sequence[str]) -> dict[str, LineStyle]:
    """The look of each label's line, from dark to pale."""
    colours = matplotlib.colormaps[COLOUR_MAP]
    styles = {}
    for i, label in enumerate(labels):
        share = DARKEST * i / max(len(labels) - 1, 1)
        styles[label] = LineStyle(colours(share), MARKERS[i % len(MARKERS)], "-")
    return styles
