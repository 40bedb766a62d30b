"""Figures of attention over independent normal scores."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from anlit.configuration import attention_label
from anlit.evaluation.diagnose.plot import SMALL, panels
from anlit.reporting.figure import DASHES, Look, looks, plt, save, style

OVER_N = {
    "entropy": "entropy (nats)",
    "inverse_largest_weight": "1/w_max (keys)",
    "participation": "Σw²",
    "weight_latest_100": "weight on the last 100 tokens",
}


def draw(folder: Path, found: dict[str, Any]) -> dict[str, Path]:
    """Write the figures into `folder`; returns their files by title."""
    longest = max(next(iter(found.values())))
    files = {f"Ranges of distances, a query with {longest:,} keys": (folder / "ranges.png", ranges_figure)}
    if len(next(iter(found.values()))) > 1:
        files["Over the number of keys"] = (folder / "statistics.png", statistics_figure)
    with style(), plt.rc_context(SMALL):
        for title, (file, figure_of) in files.items():
            figure = figure_of(found)
            figure.suptitle(f"{title}: independent normal scores", x=0.01, ha="left")
            save(figure, file)
    return {title: file for title, (file, _) in files.items()}


def ranges_figure(found: dict[str, Any]) -> Figure:
    """[SI]'s figures 1 and 2: the expected total weight in [t, 10t), and the entropy there, at the largest n."""
    figure, axes = panels(3, 3, 3.8, 3.2)
    kinds = {
        "expected_total": "expected total weight E Σ e^L in [t, 10t)",
        "weight": "share of the weights w in [t, 10t)",
        "entropy": "entropy in [t, 10t) (nats)",
    }
    for ax, (kind, title) in zip(axes, kinds.items(), strict=True):
        for (name, lengths), look in zip(found.items(), styles(found), strict=True):
            at = lengths[max(lengths)]
            begins = _decades(at)
            means = [at[f"{kind}_{t}_to_{10 * t}"]["mean"] for t in begins]
            _line(ax, begins, means, look, name)
        ax.set_title(title)
        ax.set_xlabel("t (tokens)")
        if kind == "expected_total":
            ax.set_yscale("log")
        else:
            ax.set_ylim(bottom=0)
    _legend(figure, axes[0])
    return figure


def statistics_figure(found: dict[str, Any]) -> Figure:
    """Each statistic over n, a line per mechanism."""
    figure, axes = panels(len(OVER_N), len(OVER_N), 3.2, 3.0)
    for ax, (column, title) in zip(axes, OVER_N.items(), strict=True):
        for (name, lengths), look in zip(found.items(), styles(found), strict=True):
            _line(ax, list(lengths), [at[column]["mean"] for at in lengths.values()], look, name)
        ax.set_title(title)
        ax.set_xlabel("keys n")
        if column in ("inverse_largest_weight", "participation"):
            ax.set_yscale("log")
        else:
            ax.set_ylim(bottom=0)
    _legend(figure, axes[2])
    return figure


def styles(names: Iterable[str]) -> list[Look]:
    """The look of each mechanism's line. The dashes differ too, because some curves coincide."""
    drawn = looks([shown(name) for name in names])
    return [look._replace(dash=DASHES[number % len(DASHES)]) for number, look in enumerate(drawn.values())]


def shown(name: str) -> str:
    """A mechanism's name in a legend: `scale-invariant` for ScaleInvariant and for scale_invariant.yaml."""
    return "sliding window" if name == "SlidingWindow" else attention_label(name).replace("_", "-")


def _line(ax: Axes, x: list[int], y: list[float], look: Look, name: str) -> None:
    values = np.array(y, dtype=float)
    ax.plot(x, values, look.dash, color=look.colour, linewidth=1.6, marker=look.marker, markersize=4, label=shown(name))
    ax.set_xscale("log")
    ax.xaxis.set_minor_formatter(NullFormatter())


def _decades(at: dict[str, Any]) -> list[int]:
    """The t of the ranges [t, 10t) that a record has, from 1."""
    return [t for t in (10**power for power in range(20)) if f"entropy_{t}_to_{10 * t}" in at]


def _legend(figure: Figure, ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    found = dict(zip(labels, handles, strict=True))
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=min(6, len(found)))
