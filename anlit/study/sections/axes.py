"""Names, units, ticks and ranges of the axes in a study's pictures, and lines with error bars."""

import math
from collections.abc import Container, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import NullLocator

from anlit.compare.statistics import Summary
from anlit.reporting.figure import LineStyle
from anlit.reporting.text import short_number

Point = tuple[float, Summary]
"""x, and the values of the seeds."""
Lines = Mapping[str, Sequence[Point]]
"""The points of each label."""
BARS_TITLE = "bars: ± standard deviation over seeds"
DISPLAY_NAMES = {
    "tokens": "training tokens",
    "flops": "training compute",
    "lr": "learning rate",
    "batch_size": "batch size",
    "tau": "τ",
    "d_model": "width",
    "tokens_per_parameter": "tokens per parameter",
}
"""Names of settings in headings and sentences; other settings have their name in the YAML."""
UNITS = {
    "flops": "training compute (6 N D, FLOPs)",
    "lr": "peak learning rate",
    "batch_size": "batch size (sequences)",
    "loss": "validation loss (nats per token)",
}
"""Labels of axes."""
MIN_TICK_RATIO = 1.1
"""Nearer values share a tick: arms of the same width have slightly different parameters."""
MIN_TICK_DISTANCE = 1 / 8
"""The least distance of two ticks as a share of an axis. With less, the axis has decades."""
TOP = 3.0
"""An axis of losses ends at this multiple of the median's distance from the best."""
MARGIN = 0.08
"""Free share of an axis of losses below the best and above its end."""


def draw_lines(
    axes: Axes, lines: Lines, styles: Mapping[str, LineStyle], not_joined: Container[str] = ()
) -> bool:
    """Draw means over seeds, joined by lines, and bars of a standard deviation.

    A mean without all seeds is left out. Returns whether there are bars.
    """
    has_bars = False
    for label, points in lines.items():
        colour, marker, dash = styles[label]
        means = [np.nan if y.mean is None else y.mean for _, y in points]
        deviations = [y.sd or np.nan for _, y in points]
        has_deviations = bool(np.isfinite(deviations).any())
        has_bars = has_bars or has_deviations
        axes.errorbar(
            [x for x, _ in points],
            means,
            deviations if has_deviations else None,
            capsize=2,
            elinewidth=0.8,
            color=colour,
            fmt=marker,
            linestyle="none" if label in not_joined else dash,
            linewidth=1.2,
            markersize=4,
            label=label,
        )
    axes.grid(True)
    return has_bars


def display_name(key: str) -> str:
    """A setting's name for readers."""
    return DISPLAY_NAMES.get(key, key)


def set_scale(axis: Axis, values: Sequence[float]) -> None:
    """Make an axis logarithmic, with a tick for each value. With a value of 0 it stays linear."""
    if min(values) > 0:
        axes = axis.axes
        set_axis_scale = axes.set_xscale if axis is axes.xaxis else axes.set_yscale
        set_axis_scale("log")
        set_ticks(axis, values)


def set_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Set a tick for each value on a logarithmic axis if there is room, else for each decade."""
    ticks = distinct_values(values)
    min_distance = MIN_TICK_DISTANCE * math.log(ticks[-1] / ticks[0])
    if len(ticks) == 1 or min(np.diff(np.log(ticks))) > min_distance:
        axis.set_ticks(ticks, labels=[short_number(tick) for tick in ticks])
        axis.set_minor_locator(NullLocator())


def distinct_values(values: Sequence[float]) -> list[float]:
    """The values in order, without values that differ little from the previous value."""
    distinct: list[float] = []
    for value in sorted(values):
        if not distinct or value > distinct[-1] * MIN_TICK_RATIO:
            distinct.append(value)
    return distinct


def loss_range(losses: Sequence[float]) -> tuple[float, float]:
    """The lowest loss, and the end of an axis on which far higher losses would hide the others."""
    best = min(losses)
    distance = float(np.median(losses)) - best
    if distance == 0:  # half of the losses are the lowest
        distance = float(np.median([loss for loss in losses if loss > best] or [best])) - best
    return best, min(max(losses), best + TOP * distance)


def with_margin(best: float, top: float) -> tuple[float, float]:
    """The limits of an axis of losses from `best` to `top`."""
    height = (top - best) * MARGIN or 1.0
    return best - height, top + height
