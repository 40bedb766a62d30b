"""The picture of `anlit benchmark attention`: time per token over the length."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from anlit.analysis.plots import BASELINE_COLOUR, COLOURS

MARKERS = "osD^vPX*"


def plot(record: Mapping[str, Any], path: Path) -> None:
    """Write one panel for each head width, dense and with documents, as PNG; nothing where nothing was timed.

    Colours tell the mechanism, markers the kernel; bars reach from the fastest round to the slowest.
    """
    panels = sorted({(s["shape"]["documents"], s["shape"]["width"]) for s in record["shapes"]})
    labels = list(dict.fromkeys(_label(r) for s in record["shapes"] for r in s["entrants"] if r["reason"] is None))
    if not labels:
        return
    mechanisms = list(dict.fromkeys(label.split(", ")[0] for label in labels))
    kernels = list(dict.fromkeys(label.split(", ")[1] for label in labels))
    widths = sorted({width for _, width in panels})
    size = (max(6.5, 4.4 * len(widths)), 3.3 * len({d for d, _ in panels}) + 0.9)
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        rows = sorted({documents for documents, _ in panels})
        figure, grid = plt.subplots(
            len(rows), len(widths), figsize=size, squeeze=False, layout="constrained", sharey="row"
        )
        for documents, width in panels:
            ax = grid[rows.index(documents)][widths.index(width)]
            for label in labels:
                mechanism, kernel = label.split(", ")
                colour = (BASELINE_COLOUR, *COLOURS)[mechanisms.index(mechanism) % (len(COLOURS) + 1)]
                marker = MARKERS[kernels.index(kernel) % len(MARKERS)]
                _draw(ax, record, documents, width, label, colour, marker)
            ax.set_title(f"head width {width}, {'documents' if documents else 'one document'}", loc="left")
            _dress(ax, sorted({s["shape"]["length"] for s in record["shapes"]}))
        for axes in grid:
            axes[0].set_ylabel("forward + backward (µs per token)")
        handles = {h.get_label(): h for axes in grid for ax in axes for h in ax.get_legend_handles_labels()[0]}
        columns = min(len(handles), 3)
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _draw(
    ax: Axes, record: Mapping[str, Any], documents: bool, width: int, label: str, colour: str, marker: str
) -> None:
    x, y, low, high = [], [], [], []
    for shape in record["shapes"]:
        sizes = shape["shape"]
        if (sizes["documents"], sizes["width"]) != (documents, width):
            continue
        for row in shape["entrants"]:
            if row["reason"] is None and _label(row) == label:
                unit = 1e-6 * sizes["batch"] * sizes["length"]
                least, middle, most = (row["both"][kind] / unit for kind in ("min", "median", "max"))
                x.append(sizes["length"])
                y.append(middle)
                low.append(middle - least)
                high.append(most - middle)
    if x:
        ax.errorbar(x, y, (low, high), label=label, color=colour, marker=marker, markersize=5, linewidth=1.5, capsize=2)


def _dress(ax: Axes, lengths: list[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(lengths)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
    )
    for set_formatter in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
        set_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "1235" else ""))
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.set_xlabel("length (tokens)")


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['mechanism']}, {row['kernel']}"
