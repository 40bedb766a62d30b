"""The figures of `anlit diagnose`, each for the measurements at one sequence length, `result`.

`result` is an entry of `lengths` in diagnose.json:

length        tokens per sequence
edges         the smallest n of each bin: 1, 2, 4 …; n is the number of keys that a query sees
queries       the number of queries in each bin
statistics    {name: [layer][head][bin]}, means over the queries, NaN in a bin without queries
"""

from itertools import cycle, product
from typing import Any, NamedTuple

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from anlit.nn.attention.statistics import ranges
from anlit.reporting.figure import (
    COLOUR_MAP,
    DASHES,
    MARKERS,
    SHADED,
    TEXT_WIDTH,
    legend_below,
    panels,
    shade,
)


class Statistic(NamedTuple):
    """A statistic in tables and figures."""

    title: str
    decimals: int
    is_logarithmic: bool = False


STATISTICS = {
    "entropy": Statistic("entropy (nats)", 2),
    "inverse_largest_weight": Statistic("1/w_max", 1, is_logarithmic=True),
    "attention_sink": Statistic("first token", 3),
    "weight_latest_100": Statistic("last 100", 3),
    "squared_average": Statistic("‖Σwv‖ /‖v‖", 3, is_logarithmic=True),
    "orthogonal": Statistic("√Σw²", 3, is_logarithmic=True),
}
"""The columns of the table, and the panels of `draw_statistics`."""
WEIGHTS = ("attention_sink", "weight_latest_100")
"""Statistics that are a share of the weight."""
LEGEND_TITLE = "line: mean over heads; band: from the smallest to the largest head"
MAX_TICKS = 5
MIN_QUERY_SHARE = 0.01
"""The last bin shown has at least this share of all queries. Later means are too noisy."""


def n_reliable_bins(result: dict[str, Any]) -> int:
    """The number of bins to show: up to the last that has enough queries."""
    queries = np.array(result["queries"])
    return int(np.flatnonzero(queries >= MIN_QUERY_SHARE * sum(result["queries"]))[-1]) + 1


def last_bin(result: dict[str, Any]) -> tuple[int, int]:
    """The smallest and largest n of the last bin that is shown."""
    edges = result["edges"]
    low = edges[n_reliable_bins(result) - 1]
    high = result["length"] if low == edges[-1] else 2 * low - 1
    return low, high


def statistic_values(result: dict[str, Any], name: str) -> np.ndarray:
    """A statistic as (layers, heads, bins).

    `squared_average` and `orthogonal` are lengths of the average Σwv: root mean squares over
    queries. The record has their squares; `orthogonal` is √`participation`, the length if the
    values v were orthogonal.
    """
    stored_name = "participation" if name == "orthogonal" else name
    values = np.array(result["statistics"][stored_name], dtype=float)
    return np.sqrt(values) if name in ("orthogonal", "squared_average") else values


def draw_statistics(result: dict[str, Any], training_length: int) -> Figure:
    """Draw each statistic over n: a line for each layer, and a band over its heads."""
    figure, all_axes = panels(len(STATISTICS), 3, TEXT_WIDTH / 3, 1.8)
    for axes, (name, statistic) in zip(all_axes, STATISTICS.items(), strict=True):
        _draw_layers(axes, result, name)
        title = statistic.title
        axes.set_title(f"weight, {title}" if name in WEIGHTS else title)
        if statistic.is_logarithmic:
            set_log_axis(axes)
        elif name in WEIGHTS:
            axes.set_ylim(0, 1.05)
    _finish(figure, all_axes, 3, training_length)
    return figure


def set_log_axis(axes: Axes) -> None:
    """Make the y axis logarithmic, with plain numbers.

    Less than a factor of 30 has one or two powers of 10, too few for ticks.
    """
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7) if high < 30 * low else (1,)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_ranges(result: dict[str, Any], training_length: int) -> Figure:
    """Draw weight (top) and entropy (bottom) in ranges of distances over n.

    Only ranges that begin within every context of the last bin are shown.
    """
    longest_shown, _ = last_bin(result)
    spans = [span for span in ranges(result["length"] - 1) if span.first < longest_shown]
    figure, all_axes = panels(2 * len(spans), len(spans), TEXT_WIDTH / len(spans), 1.7)
    for axes, (kind, span) in zip(all_axes, product(("weight", "entropy"), spans), strict=True):
        name = f"{kind}_{span}"
        if name not in result["statistics"]:
            axes.set_axis_off()
            continue
        _draw_layers(axes, result, name)
        distances = "own token" if span.end == 1 else f"[{span.first:,}, {span.end:,})"
        axes.set(title=f"{kind}, {distances}", ylim=(0, 1 if kind == "weight" else None))
        axes.tick_params(labelleft=kind == "entropy" or span == spans[0])
    _finish(figure, all_axes, len(spans), training_length)
    return figure


def _draw_layers(axes: Axes, result: dict[str, Any], name: str) -> None:
    """Draw a line for each layer, the mean over heads at each bin's mean n, and a band."""
    n_bins = n_reliable_bins(result)
    layers = statistic_values(result, name)[:, :, :n_bins]
    # The mean n of each bin, (bins,): the same in all layers and heads.
    n = statistic_values(result, "n")[0, 0, :n_bins]
    for heads, line in zip(layers, layer_lines(len(layers)), strict=True):  # heads (heads, bins)
        has_values = np.isfinite(heads).any(0)
        x = n[has_values]
        heads = heads[:, has_values]
        axes.plot(x, np.nanmean(heads, 0), **line)
        band = {"color": line["color"], "alpha": 0.13, "linewidth": 0}
        axes.fill_between(x, np.nanmin(heads, 0), np.nanmax(heads, 0), **band)
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.9, 2.2 * result["edges"][n_bins - 1])
    axes.xaxis.set_major_locator(LogLocator(2, numticks=MAX_TICKS + 1))
    axes.xaxis.set_major_formatter("{x:,.0f}")


def layer_lines(n_layers: int) -> list[dict[str, Any]]:
    """The look and label of each layer's line, as arguments of `plot`."""
    colours = plt.get_cmap(COLOUR_MAP)(np.linspace(0, 0.8, n_layers))
    styles = zip(colours, cycle(DASHES), cycle(MARKERS), strict=False)
    lines = []
    for layer, (colour, dash, marker) in enumerate(styles):
        label = f"layer {layer}"
        lines.append({"color": colour, "linestyle": dash, "marker": marker, "label": label})
    return lines


def _finish(figure: Figure, all_axes: list[Axes], n_columns: int, training_length: int) -> None:
    """Add the legend, the name of x below the lowest row, and the shade beyond training."""
    x_label = "context length n (tokens)" if n_columns <= 3 else "n (tokens)"
    for axes in all_axes[-n_columns:]:
        axes.set_xlabel(x_label)
    for axes in all_axes:
        shade(axes, training_length)
    legend_below(figure, [*all_axes[0].get_lines(), SHADED], 6, LEGEND_TITLE)
