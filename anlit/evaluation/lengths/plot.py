"""The figure of `anlit lengths`: loss over the length, and over the position at the longest length."""

import math
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from anlit.analysis.statistics import Summary
from anlit.reporting.figure import SHADED, TEXT, legend_below, line_styles, shade

# The first positions have almost no context. Their losses are so large that other differences would not be visible.
FIRST_SHOWN = 8
FEWEST_SHOWN = 3
MOST_TICKS = 5
APART = 0.05
"""Distance of the lines' points on the logarithmic axis, so that their error bars can be told apart."""
Points = list[tuple[float, float | None, float | None]]
"""log₂ of a number of tokens, with the mean and the standard deviation of the loss there."""


def seeds(record: dict[str, Any], arm: dict[str, Any], length: int, masked: bool) -> list[dict[str, Any]]:
    """The measurement of each seed of an arm."""
    return [
        own
        for member in arm["checkpoints"]
        for own in record["measurements"][member]
        if (own["length"], own["masking"]) == (length, masked)
    ]


def plot(record: dict[str, Any]) -> Figure:
    """A row of two panels for documents masked and not masked: by length, and by position.

    Points are means over seeds, bars ± one standard deviation over seeds. The standard errors over sequences are in
    the tables. What is longer than the training length is shaded.
    """
    masking, lengths, arms = record["settings"]["masking"], record["settings"]["lengths"], record["arms"]
    size = (TEXT, 0.3 + 2.3 * len(masking) + 0.16 * len(arms))
    figure, grid = plt.subplots(len(masking), 2, figsize=size, sharex="col", sharey="col", squeeze=False)
    styles = {
        label: {
            "color": look.colour,
            "marker": look.marker,
            "linestyle": look.dash,
            "linewidth": 1.2,
            "markersize": 3.5,
        }
        for label, look in line_styles([arm["label"] for arm in arms]).items()
    }
    for axes, masked in zip(grid, masking, strict=True):
        for number, arm in enumerate(arms):
            shift, style = APART * (number - (len(arms) - 1) / 2), styles[arm["label"]]
            _draw(axes[0], _by_length(arm, masked), shift, style)
            _draw(axes[1], _by_position(seeds(record, arm, lengths[-1], masked)), shift, style)
        for ax, title in zip(axes, ("by length", "by position"), strict=True):
            ax.set_title(f"{title}, documents {'masked' if masked else 'not masked'}")
            ax.set_ylabel("loss (nats per token)")
            ax.grid()
    trained = math.log2(max(own["training_length"] for own in record["checkpoints"]))
    for column, (label, ticks, begin) in enumerate([
        ("sequence length (tokens)", lengths, trained + APART * len(arms) / 2),
        (f"earlier tokens that the model sees (of {lengths[-1]:,})", _powers(grid[0, 1]), trained),
    ]):  # fmt: skip
        chosen = ticks[::-1][:: math.ceil(len(ticks) / MOST_TICKS)]
        grid[-1, column].set_xlabel(label)
        grid[-1, column].set_xticks(np.log2(chosen), [f"{tick:,}" for tick in chosen])
        for ax in grid[:, column]:
            shade(ax, begin)
    handles = [Line2D([], [], **styles[arm["label"]], label=_name(arm)) for arm in arms]
    if any(len(arm["checkpoints"]) > 1 for arm in arms):
        handles.append(Line2D([], [], color="0.4", marker="|", linestyle="", label="± standard deviation over seeds"))
    legend_below(figure, [*handles, SHADED])
    return figure


def _by_length(arm: dict[str, Any], masked: bool) -> Points:
    return [(math.log2(own["length"]), own["mean"], own["sd"]) for own in arm["loss"] if own["masking"] == masked]


def _by_position(measurements: list[dict[str, Any]]) -> Points:
    """Each range that has tokens at its middle; without the first positions if enough others are left."""
    ranges = list(zip(*(own["by_position"] for own in measurements), strict=True))
    full = [each for each in ranges if each[0]["estimate"]["tokens"]]
    later = [each for each in full if each[0]["first"] >= FIRST_SHOWN]
    points = []
    for each in later if len(later) >= FEWEST_SHOWN else full:
        first, end = each[0]["first"], each[0]["end"]
        loss = Summary(tuple(part["estimate"]["loss"] for part in each))
        points.append(((math.log2(first) + math.log2(end)) / 2 if first else -0.5, loss.mean, loss.sd))
    return points


def _draw(ax: Axes, points: Points, shift: float, style: dict[str, Any]) -> None:
    x, mean, sd = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    ax.plot(x + shift, mean, **style)
    ax.errorbar(x + shift, mean, sd, fmt="none", ecolor=style["color"], elinewidth=0.7, alpha=0.7)


def _powers(ax: Axes) -> list[int]:
    """The powers of two on an axis of logarithms."""
    low, high = ax.get_xlim()
    return [1 << power for power in range(max(0, math.ceil(low)), math.floor(high) + 1)]


def _name(arm: dict[str, Any]) -> str:
    n = len(arm["checkpoints"])
    return f"{arm['label']} ({n} seed{'s' if n > 1 else ''})"
