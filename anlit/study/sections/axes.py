"""Names, units, ticks and ranges of the axes in a study's pictures."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axis import Axis
from matplotlib.ticker import NullLocator

from anlit.reporting.text import short_number

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
    return best, min(max(losses), best + TOP * (float(np.median(losses)) - best))


def with_margin(best: float, top: float) -> tuple[float, float]:
    """The limits of an axis of losses from `best` to `top`."""
    height = (top - best) * MARGIN or 1.0
    return best - height, top + height
