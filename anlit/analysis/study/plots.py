"""The pictures of a study's sections: heat maps, trends, changes against a baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from anlit.analysis.study.outcome import Point
from anlit.reporting.figure import BASELINE_LINE, COLOURS, INK, MAP, looks, save, style
from anlit.reporting.intervals import PowerLaw
from anlit.reporting.text import minus

PER_ROW = 3
NAMES = {"tokens": "training tokens", "flops": "training compute", "lr": "learning rate", "batch_size": "batch size",
         "tau": "τ", "d_model": "width"}  # fmt: skip
"""Names of settings in headings and sentences; other settings have their name in the YAML."""
UNITS = {"flops": "training compute (6 N D, FLOPs)", "lr": "peak learning rate", "batch_size": "batch size (sequences)",
         "loss": "validation loss (nats per token)"}  # fmt: skip
# The factor by which lines at one x are moved apart, so that their error bars do not overlap.
APART = 1.02
# Losses this far above a panel's best share the darkest colour: a diverging run must not wash out the rest.
WORST = 0.10


def heat_maps(panels: dict[str, list[Point]], x: str, y: str, path: Path) -> None:
    """Writes a map of the loss over two settings for each panel, with a frame around the best cell."""
    columns = min(PER_ROW, len(panels))
    rows = -(-len(panels) // columns)
    with style():
        figure, axes = plt.subplots(rows, columns, figsize=(4.3 * columns + 0.6, 3.3 * rows), squeeze=False)
        for ax, (title, points) in zip(axes.flat, panels.items(), strict=False):
            _heat_map(ax, points, x, y)
            ax.set_title(title, loc="left", fontsize=10)
        for ax in list(axes.flat)[len(panels) :]:
            ax.set_axis_off()
        save(figure, path)


def _heat_map(ax: Axes, points: list[Point], x: str, y: str) -> None:
    across, up = (sorted({point.number(name) for point in points}) for name in (x, y))
    grid = np.full((len(up), len(across)), np.nan)
    for point in points:
        place = up.index(point.number(y)), across.index(point.number(x))
        grid[place] = np.nanmin([grid[place], point.loss])  # of several points there, the best
    finite = grid[np.isfinite(grid)]
    low = float(finite.min()) if len(finite) else 0.0
    shown = np.where(np.isinf(grid), np.nan, grid)
    ax.imshow(shown, cmap=f"{MAP}_r", vmin=low, vmax=low * (1 + WORST) or 1, origin="lower", aspect="auto")
    for (i, j), loss in np.ndenumerate(grid):
        text = "" if np.isnan(loss) else "failed" if np.isinf(loss) else f"{loss:.3f}"
        dark = np.isfinite(loss) and loss > low * (1 + 0.5 * WORST)
        ax.text(j, i, text, ha="center", va="center", fontsize=8.5, color="white" if dark else "black")
        if loss == low:
            frame = plt.Rectangle((j - 0.48, i - 0.48), 0.96, 0.96, fill=False, edgecolor="#D55E00", linewidth=2.5)
            ax.add_patch(frame)
    ax.set_xticks(range(len(across)), [f"{value:g}" for value in across])
    ax.set_yticks(range(len(up)), [f"{value:g}" for value in up])
    ax.set_xlabel(axis_label(x))
    ax.set_ylabel(axis_label(y))


def trends(
    series: dict[str, list[tuple[float, float, float]]],
    over: str,
    value: str,
    path: Path,
    curves: Mapping[str, PowerLaw],
) -> None:
    """Writes lines of (x, y, standard deviation of y), with x on a logarithmic axis, and fitted power laws."""
    with style():
        figure, ax = plt.subplots(figsize=(7.5, 4.6))
        drawn = looks(list(series))
        for i, (label, found) in enumerate(series.items()):
            colour, marker, dash = drawn[label]
            x, y, sd = (np.array(column) for column in zip(*sorted(found), strict=True))
            fitted = curves.get(label)
            beside = x * APART ** (i - (len(series) - 1) / 2)  # error bars stand side by side
            ax.errorbar(beside, y, yerr=np.where(sd > 0, sd, np.nan), fmt=marker, linestyle="none" if fitted else dash,
                        color=colour, capsize=2, elinewidth=1, label=label, markersize=5.5)  # fmt: skip
            if fitted is not None:
                fine = np.geomspace(x.min(), x.max(), 100)
                ax.plot(fine, fitted(fine), "-", color=colour, linewidth=1.5)
        ax.set_xscale("log")
        if value != "loss":
            ax.set_yscale("log")
            heights = sorted({y for found in series.values() for _, y, _ in found})
            ax.set_yticks(heights, [short_number(y) for y in heights])
            ax.set_ylim(heights[0] / 1.3, heights[-1] * 1.3)
        shown = sorted({x for found in series.values() for x, _, _ in found})
        ax.set_xticks(shown, [short_number(x) for x in shown])
        ax.minorticks_off()
        ax.grid()
        ax.set_xlabel(axis_label(over))
        ax.set_ylabel(axis_label(value))
        has_bars = any(sd > 0 for found in series.values() for *_, sd in found)
        explained = "bars: ± standard deviation over seeds" if has_bars else None
        figure.legend(loc="outside lower center", ncols=3, title=explained)
        save(figure, path)


def changes(rows: Sequence[tuple[str, float | str, tuple[float, float] | None]], path: Path, baseline: str) -> None:
    """Writes the change of the loss against a baseline, in per cent of its loss, with 95 % intervals.

    Args:
        rows: The title of each arm, its change (or a word instead), and the interval of the change.
        path: The picture.
        baseline: The title of the baseline.
    """
    with style():
        figure, ax = plt.subplots(figsize=(8.5, 1.4 + 0.42 * len(rows)))
        heights = range(len(rows))[::-1]
        for y, (_, mean, interval) in zip(heights, rows, strict=True):
            if isinstance(mean, str):
                ax.text(0, y, f"  {mean}", va="center", color=INK, fontstyle="italic")
                continue
            colour = COLOURS[0] if mean < 0 else COLOURS[1]
            ax.plot([mean], [y], "o", color=colour)
            if interval is not None:
                ax.plot(interval, [y, y], "-", color=colour, linewidth=2)
            ax.annotate(
                minus(f"{mean:+.2f} %"), (mean, y), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8.5
            )
        ax.axvline(0, color=INK, linestyle=BASELINE_LINE, linewidth=1)
        ax.set_yticks(list(heights), [title for title, *_ in rows])
        ax.set_ylim(-0.6, len(rows) - 0.2)
        ax.grid(axis="x")
        ax.set_xlabel(f"change of the final validation loss against\n{baseline} (%, 95 % interval; left is better)")
        save(figure, path)


def named(key: str) -> str:
    """A setting's name for readers."""
    return NAMES.get(key, key)


def axis_label(key: str) -> str:
    """A setting's name with its unit."""
    return UNITS.get(key, named(key))


def short_number(value: float) -> str:
    """`1.3M`, `820k`, `0.004`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:g}"
