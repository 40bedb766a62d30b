"""The picture of `anlit benchmark growth`: a step's time and memory over T, d and L, with the fitted powers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator, ScalarFormatter

from anlit.benchmarks.step import NAMES
from anlit.reporting.figure import COLOURS, INK, save, style

AXIS_LABELS = {"T": "T, tokens in a sequence (tokens in a batch stay)", "d": "d, model width", "L": "L, layers"}
QUANTITIES = {"seconds": "step (ms)", "bytes": "peak memory (GB)"}
STYLES = {"GPT": (INK, "o"), "nGPT": (COLOURS[1], "s"), "anGPT": (COLOURS[0], "D")}


def plot(fits: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a column for each axis and a row for each quantity; nothing if nothing was measured."""
    axes = list(dict.fromkeys(fit["axis"] for fit in fits))
    if not axes:
        return
    with style():
        figure, grid = plt.subplots(2, len(axes), figsize=(4.6 * len(axes), 8.2), squeeze=False)
        for column, axis in enumerate(axes):
            shown = [fit for fit in fits if fit["axis"] == axis]
            for row, kind in enumerate(QUANTITIES):
                ax = grid[row][column]
                drawn = [_draw(ax, fit, kind) for fit in shown]
                _dress(ax, sorted({value for fit in shown for value in fit["x"]}))
                ax.set_xlabel(AXIS_LABELS[axis])
                if any(drawn):
                    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False, fontsize=9)
        for row, label in enumerate(QUANTITIES.values()):
            grid[row][0].set_ylabel(label)
        save(figure, path)


def _draw(ax: Axes, fit: Mapping[str, Any], kind: str) -> bool:
    if not fit["y"][kind]:
        return False
    unit = 1e3 if kind == "seconds" else 1e-9
    x, y = (np.asarray(values, dtype=float) for values in (fit["x"], fit["y"][kind]))
    label, (colour, marker) = NAMES.get(fit["model"], fit["model"]), STYLES[fit["model"]]
    if (power := fit[kind]) is not None:
        label += ": exponent {:.2f} ({:.2f} – {:.2f})".format(*power.exponent)
        if kind == "seconds":
            label += f", FLOPs {fit['flops'].exponent.median:.2f}"
        ax.plot(x, unit * power(x), "--", color=colour, linewidth=1)
    ax.plot(x, unit * y, linestyle="none", marker=marker, markersize=5.5, color=colour, label=label)
    return True


def _dress(ax: Axes, values: list[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(values)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 2048 else f"{x:g}"))
    ax.yaxis.set_major_formatter(ScalarFormatter())
    ax.grid(alpha=0.25, linewidth=0.6)
