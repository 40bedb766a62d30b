"""Figures of a model's attention statistics."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from anlit.reporting.figure import COLOURS, INK, MAP, heat_map, panels, save, style

SMALL: Any = {"font.size": 9, "axes.titlesize": 9}
TITLES = {
    "entropy": "entropy (nats)",
    "inverse_largest_weight": "1/w_max (keys)",
    "participation": "Σw²",
    "weight_on_first": "weight on the first token",
    "weight_latest_100": "weight on the last 100 tokens",
    "squared_average": "‖Σwv‖ / ‖v‖, root mean squares",
}
LOGARITHMIC = ("inverse_largest_weight", "participation", "squared_average")
HEADS = "line: mean over heads; band: from the smallest to the largest head"
# Heat maps with more cells than this show no numbers.
MOST_NUMBERS = 200


def reliable(found: dict[str, Any]) -> int:
    """The number of bins to show: up to the last that has at least 1 % of the queries."""
    queries = np.array(found["queries"])
    return int(np.flatnonzero(queries >= 0.01 * queries.sum())[-1]) + 1


def last_bin(found: dict[str, Any]) -> tuple[int, int]:
    """The smallest and largest n of the last bin that is shown."""
    edge, shown = found["edges"][reliable(found) - 1], reliable(found)
    return edge, found["length"] if shown == len(found["edges"]) else 2 * edge - 1


def draw(folder: Path, label: str, found: dict[str, Any]) -> dict[str, Path]:
    """Write the figures of one length into `folder`; returns their files by title."""
    files = {
        "Statistics over the context length": (folder / "statistics.png", statistics_figure),
        "Weight and entropy in ranges of distances": (folder / "ranges.png", ranges_figure),
        "Each head": (folder / "heads.png", heads_figure),
    }
    with style(), plt.rc_context(SMALL):
        for title, (file, figure_of) in files.items():
            figure = figure_of(found)
            figure.suptitle(f"{title}: {label}", x=0.01, ha="left")
            save(figure, file)
    return {title: file for title, (file, _) in files.items()}


def statistics_figure(found: dict[str, Any]) -> Figure:
    """Each statistic over n: for each layer a line, the mean over heads, and a band over the range of the heads."""
    figure, axes = panels(len(TITLES), 3, 3.6)
    for ax, (name, title) in zip(axes, TITLES.items(), strict=True):
        _layers(ax, found, name)
        ax.set_title(title)
        if name in LOGARITHMIC:
            _logarithmic(ax)
    _legend(figure, axes[0])
    return figure


def ranges_figure(found: dict[str, Any]) -> Figure:
    """Weight (top) and entropy (bottom) in ranges of distances over n, for the ranges that most long contexts reach."""
    spans = [
        name.removeprefix("weight_") for name in found["statistics"] if name.startswith("weight_") and "_to_" in name
    ]
    spans = [span for span in spans if int(span.split("_")[0]) < found["edges"][reliable(found) - 1]]
    figure, axes = panels(2 * len(spans), len(spans), 2.8, 2.3)
    for ax, (kind, span) in zip(axes, itertools.product(("weight", "entropy"), spans), strict=True):
        first, _, end = span.split("_")
        if f"{kind}_{span}" not in found["statistics"]:
            ax.set_axis_off()
            continue
        _layers(ax, found, f"{kind}_{span}")
        where = "distance 0" if end == "1" else f"[{first}, {end})"
        what = "entropy (nats)" if kind == "entropy" else kind
        ax.set_title(f"{what}, {where}")
        ax.set_ylim(0, 1 if kind == "weight" else None)
    _legend(figure, axes[0])
    return figure


def heads_figure(found: dict[str, Any]) -> Figure:
    """Entropy (at most ln n) and weight on the first token of each head, at the longest context lengths."""
    last, (low, high) = reliable(found) - 1, last_bin(found)
    shape = np.array(found["statistics"]["entropy"])[..., last].shape
    size = (2 * (1.4 + 0.45 * shape[1]) + 1, 1.5 + 0.32 * shape[0])
    figure, axes = plt.subplots(1, 2, figsize=size)
    for ax, name, top in zip(axes, ("entropy", "weight_on_first"), (math.log(high), 1.0), strict=True):
        values = np.array(found["statistics"][name], dtype=float)[..., last]
        figure.colorbar(heat_map(ax, values, top, values.size <= MOST_NUMBERS), ax=ax)
        ax.set_title(TITLES[name])
        ax.set_ylabel("layer")
        ax.set_xticks(range(values.shape[1]))
        ax.set_yticks(range(values.shape[0]))
        ax.set_xlabel(f"head (n = {low:,} to {high:,})")
    return figure


def layer_colours(count: int) -> list[Any]:
    """Okabe and Ito's colours if there are enough, else a colour scale over the layers."""
    palette = (INK, *COLOURS)
    if count <= len(palette):
        return list(palette[:count])
    return [plt.get_cmap(MAP)(0.92 * layer / (count - 1)) for layer in range(count)]


def _layers(ax: Axes, found: dict[str, Any], name: str) -> None:
    """A line for each layer, the mean over its heads at each bin's mean n; a band over the range of the heads."""
    layers = np.array(found["statistics"][name], dtype=float)
    layers = np.sqrt(layers) if name == "squared_average" else layers
    n = np.array(found["statistics"]["n"][0][0], dtype=float)
    for layer, (heads, colour) in enumerate(zip(layers, layer_colours(len(layers)), strict=True)):
        known = np.isfinite(heads).any(0) & (np.arange(len(n)) < reliable(found))
        x, heads = n[known], heads[:, known]
        ax.plot(x, np.nanmean(heads, 0), "-", color=colour, linewidth=1.6, marker=".", markersize=4,
                label=f"layer {layer}")  # fmt: skip
        ax.fill_between(x, np.nanmin(heads, 0), np.nanmax(heads, 0), color=colour, alpha=0.13, linewidth=0)
    ax.set_xscale("log", base=2)
    ax.set_xlim(0.9, 1.1 * found["edges"][reliable(found) - 1] * 2)
    ax.set_xlabel("context length n (tokens)")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _logarithmic(ax: Axes) -> None:
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    if high < 30 * low:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(8, len(labels)), title=HEADS)
