"""Figures of a model's attention statistics."""

import itertools
import math
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from anlit.reporting.figure import (
    COLOURS,
    DASHES,
    INK,
    MAP,
    MARKERS,
    SHADED,
    TEXT,
    heat_map,
    legend_below,
    panels,
    shade,
)

TITLES = {
    "entropy": "entropy (nats)",
    "inverse_largest_weight": "1/w_max (keys)",
    "participation": "Σw²",
    "attention_sink": "weight on the first token",
    "weight_latest_100": "weight on the last 100 tokens",
    "squared_average": "‖Σwv‖ / ‖v‖, root mean squares",
}
LOGARITHMIC = ("inverse_largest_weight", "participation", "squared_average")
HEADS = "line: mean over heads; band: from the smallest to the largest head"
MOST_NUMBERS = 12
"""Heat maps with more heads than this show no numbers."""
MOST_TICKS = 5


def reliable(own: dict[str, Any]) -> int:
    """The number of bins to show: up to the last that has at least 1 % of the queries."""
    queries = np.array(own["queries"])
    return int(np.flatnonzero(queries >= 0.01 * queries.sum())[-1]) + 1


def last_bin(own: dict[str, Any]) -> tuple[int, int]:
    """The smallest and largest n of the last bin that is shown."""
    edge, shown = own["edges"][reliable(own) - 1], reliable(own)
    return edge, own["length"] if shown == len(own["edges"]) else 2 * edge - 1


def values(own: dict[str, Any], name: str) -> np.ndarray:
    """A statistic as (layers, heads, bins); with square roots for the two sizes of the average."""
    table = np.array(own["statistics"]["participation" if name == "orthogonal" else name], dtype=float)
    return np.sqrt(table) if name in ("orthogonal", "squared_average") else table


def statistics_figure(own: dict[str, Any], trained: int) -> Figure:
    """Each statistic over n: for each layer a line, the mean over heads, and a band over the range of the heads."""
    figure, axes = panels(len(TITLES), 3, TEXT / 3, 1.8)
    for ax, (name, title) in zip(axes, TITLES.items(), strict=True):
        _layers(ax, own, name)
        ax.set_title(title)
        if name in LOGARITHMIC:
            _logarithmic(ax)
        elif name.startswith("weight"):
            ax.set_ylim(0, 1.05)
    _legend(figure, axes, 3, trained)
    return figure


def ranges_figure(own: dict[str, Any], trained: int) -> Figure:
    """Weight (top) and entropy (bottom) in ranges of distances over n, for the ranges that most long contexts reach."""
    spans = [
        name.removeprefix("weight_") for name in own["statistics"] if name.startswith("weight_") and "_to_" in name
    ]
    spans = [span for span in spans if int(span.split("_")[0]) < own["edges"][reliable(own) - 1]]
    figure, axes = panels(2 * len(spans), len(spans), TEXT / len(spans), 1.7)
    for ax, (kind, span) in zip(axes, itertools.product(("weight", "entropy"), spans), strict=True):
        first, _, end = span.split("_")
        if f"{kind}_{span}" not in own["statistics"]:
            ax.set_axis_off()
            continue
        _layers(ax, own, f"{kind}_{span}")
        where = "own token" if end == "1" else f"[{int(first):,}, {int(end):,})"
        ax.set_title(f"{kind}, {where}")
        ax.set_ylim(0, 1 if kind == "weight" else None)
        ax.tick_params(labelleft=kind == "entropy" or span == spans[0])
    _legend(figure, axes, len(spans), trained)
    return figure


def heads_figure(own: dict[str, Any], trained: int) -> Figure:
    """Entropy (at most ln n) and weight on the first token of each head, at the longest context lengths.

    All figures take one length of the record and the training length.
    """
    last, (low, high) = reliable(own) - 1, last_bin(own)
    n_layers, n_heads, _ = values(own, "entropy").shape
    figure, axes = plt.subplots(1, 2, figsize=(TEXT, 0.9 + min(7.0, 0.22 * n_layers + 0.5)))
    for ax, name, top in zip(axes, ("entropy", "attention_sink"), (math.log(high), 1.0), strict=True):
        picture = heat_map(ax, values(own, name)[..., last], top, n_heads <= MOST_NUMBERS)
        figure.colorbar(picture, ax=ax)
        ax.set_title(TITLES[name])
        ax.set_ylabel("layer")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
        ax.set_xlabel(f"head (n = {low:,} to {high:,})")
    return figure


def layer_colours(count: int) -> list[Any]:
    """Okabe and Ito's colours if there are enough, else a colour scale over the layers."""
    palette = (INK, *COLOURS)
    if count <= len(palette):
        return list(palette[:count])
    return [plt.get_cmap(MAP)(0.92 * layer / (count - 1)) for layer in range(count)]


def _layers(ax: Axes, own: dict[str, Any], name: str) -> None:
    """A line for each layer, the mean over its heads at each bin's mean n; a band over the range of the heads."""
    layers, n = values(own, name), values(own, "n")[0, 0]
    for layer, (heads, colour) in enumerate(zip(layers, layer_colours(len(layers)), strict=True)):
        known = np.isfinite(heads).any(0) & (np.arange(len(n)) < reliable(own))
        x, heads = n[known], heads[:, known]
        ax.plot(x, np.nanmean(heads, 0), linestyle=DASHES[layer % len(DASHES)], color=colour, linewidth=1.2,
                marker=MARKERS[layer % len(MARKERS)], markersize=3, label=f"layer {layer}")  # fmt: skip
        ax.fill_between(x, np.nanmin(heads, 0), np.nanmax(heads, 0), color=colour, alpha=0.13, linewidth=0)
    edges = own["edges"][: reliable(own)]
    ax.set_xscale("log")
    ax.set_xlim(0.9, 2.2 * edges[-1])
    ticks = edges[::-1][:: math.ceil(len(edges) / MOST_TICKS)]
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.xaxis.set_minor_locator(NullLocator())


def _logarithmic(ax: Axes) -> None:
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    if high < 30 * low:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, axes: list[Axes], columns: int, trained: int) -> None:
    """The layers in a legend below, and the name of x below the lowest row of panels."""
    for ax in axes[-columns:]:
        ax.set_xlabel("context length n (tokens)" if columns <= 3 else "n (tokens)")
    for ax in axes:
        shade(ax, trained)
    legend_below(figure, [*axes[0].get_lines(), SHADED], 6, HEADS)
