"""The figure of `anlit lengths`: loss over the length, and over the position at the longest length."""

import math
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from anlit.reporting.figure import SHADED, TEXT, LineStyle, legend_below, line_styles, shade
from anlit.reporting.intervals import Summary

# The first positions have almost no context. Their losses are so large that other differences would not be visible.
FIRST_SHOWN = 8
FEWEST_SHOWN = 3
MOST_TICKS = 5
APART = 0.05
"""Distance of the lines' points on the logarithmic axis, so that their error bars can be told apart."""


def plot(record: dict[str, Any]) -> Figure:
    """A row of two panels for documents masked and not masked: by length, and by position.

    Points are means over seeds, bars ± one standard deviation over seeds. The standard errors over sequences are in
    the tables. What is longer than the training length is shaded.
    """
    masking, arms = record["settings"]["masking"], record["arms"]
    styles = line_styles([arm["label"] for arm in arms])
    figure, grid = plt.subplots(
        len(masking), 2, figsize=(TEXT, 0.3 + 2.3 * len(masking) + 0.16 * len(arms)), sharex="col", sharey="col",
        squeeze=False,
    )  # fmt: skip
    for axes, masked in zip(grid, masking, strict=True):
        told = "documents masked" if masked else "documents not masked"
        for ax, draw, title in zip(axes, (_draw_lengths, _draw_positions), ("by length", "by position"), strict=True):
            ax.grid()
            ax.set_title(f"{title}, {told}")
            ax.set_ylabel("loss (nats per token)")
            for number, arm in enumerate(arms):
                shift = APART * (number - (len(arms) - 1) / 2)
                draw(ax, record, arm, masked, styles[arm["label"]], shift)
    lengths = record["settings"]["lengths"]
    grid[-1, 0].set_xlabel("sequence length (tokens)")
    grid[-1, 1].set_xlabel(f"earlier tokens that the model sees (of {lengths[-1]:,})")
    _ticks(grid[0, 0], lengths)
    _ticks(grid[0, 1], [edge for edge in _edges(record) if edge > 0])
    trained = math.log2(max(own["training_length"] for own in record["checkpoints"]))
    for by_length, by_position in grid:
        shade(by_length, trained + APART * len(arms) / 2)
        shade(by_position, trained)
    legend_below(figure, _legend(arms, styles))
    return figure


def _draw_lengths(
    ax: Axes, record: dict[str, Any], arm: dict[str, Any], masked: bool, style: LineStyle, shift: float
) -> None:
    x, losses = [], []
    for own in arm["loss"]:
        if own["masking"] == masked:
            x.append(math.log2(own["length"]) + shift)
            losses.append((own["mean"], own["sd"]))
    _line(ax, x, losses, style)


def _draw_positions(
    ax: Axes, record: dict[str, Any], arm: dict[str, Any], masked: bool, style: LineStyle, shift: float
) -> None:
    """Draw each range at its middle on the logarithmic axis."""
    seeds = _ranges(record, arm, masked)
    shown = _shown(seeds[0])
    losses = [Summary(tuple(ranges[k]["estimate"]["loss"] for ranges in seeds)) for k in shown]
    _line(ax, [_middle(seeds[0][k]) + shift for k in shown], [(loss.mean, loss.sd) for loss in losses], style)


def _ranges(record: dict[str, Any], arm: dict[str, Any], masked: bool) -> list[list[dict[str, Any]]]:
    """The ranges of positions of each seed at the longest length."""
    longest = record["settings"]["lengths"][-1]
    return [
        own["by_position"]
        for member in arm["checkpoints"]
        for own in record["measurements"][member]
        if (own["length"], own["masking"]) == (longest, masked)
    ]


def _shown(ranges: list[dict[str, Any]]) -> list[int]:
    """Indices of the ranges to draw: those with tokens, without the first positions if enough others are left."""
    full = [k for k, part in enumerate(ranges) if part["estimate"]["tokens"]]
    later = [k for k in full if ranges[k]["first"] >= FIRST_SHOWN]
    return later if len(later) >= FEWEST_SHOWN else full


def _edges(record: dict[str, Any]) -> list[int]:
    """Where the ranges that are drawn begin and end."""
    edges: set[int] = set()
    for arm in record["arms"]:
        for masked in record["settings"]["masking"]:
            ranges = _ranges(record, arm, masked)[0]
            edges |= {ranges[k][end] for k in _shown(ranges) for end in ("first", "end")}
    return sorted(edges)


def _middle(part: dict[str, Any]) -> float:
    """log₂ of the range's middle; position 0 is at −0.5."""
    return (math.log2(part["first"]) + math.log2(part["end"])) / 2 if part["first"] else -0.5


def _line(ax: Axes, x: list[float], points: list[tuple[float | None, float | None]], style: LineStyle) -> None:
    mean, sd = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    ax.plot(x, mean, linestyle=style.dash, marker=style.marker, markersize=3.5, color=style.colour, linewidth=1.2)
    ax.errorbar(x, mean, sd, fmt="none", ecolor=style.colour, elinewidth=0.7, alpha=0.7)


def _ticks(ax: Axes, tokens: list[int]) -> None:
    ticks = tokens[::-1][:: math.ceil(len(tokens) / MOST_TICKS)]
    ax.set_xticks(np.log2(ticks), [f"{tick:,}" for tick in ticks])


def _legend(arms: list[dict[str, Any]], styles: dict[str, LineStyle]) -> list[Line2D | Patch]:
    handles: list[Line2D | Patch] = []
    for arm in arms:
        n, style = len(arm["checkpoints"]), styles[arm["label"]]
        label = f"{arm['label']} ({n} seed{'s' if n > 1 else ''})"
        handles.append(Line2D([], [], color=style.colour, marker=style.marker, linestyle=style.dash, linewidth=1.2,
                              markersize=3.5, label=label))  # fmt: skip
    if any(len(arm["checkpoints"]) > 1 for arm in arms):
        handles.append(Line2D([], [], color="0.4", marker="|", linestyle="", label="± standard deviation over seeds"))
    return [*handles, SHADED]
