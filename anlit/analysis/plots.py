"""The pictures of a comparison: loss over tokens and over time, and the speed-ups as bars."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import matplotlib
import numpy as np

from anlit.analysis.results import Report, Result
from anlit.analysis.speedup import Crossing, Summary, crossing

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

# Okabe and Ito's palette without its yellow, which is too light for a line on white.
BASELINE_COLOUR = "#333333"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINES = ("-", "--", "-.", ":")
# The part of the curves, by tokens, that sets the upper end of the y axis.
LATE = 0.2
# Height of the picture at most, in heights of the baseline's late part.
TALLEST = 2.5
# Crossings nearer than this share of the axis have labels on different levels.
CLOSE, LEVELS = 0.13, 3
# Up to so many validation points, each is marked.
FEW = 12

Panel = Literal["tokens", "seconds"]


class Unit(NamedTuple):
    """An axis label and what one of its units is in tokens or seconds."""

    label: str
    size: float


def draw(report: Report) -> None:
    """Writes the pictures that the report names; the bars only where there is something beside the baseline."""
    plot_convergence(list(report.results), report.baseline, report.plot)
    if len(report.results) > 1:
        plot_speedups(list(report.results), report.baseline, report.bars)


def plot_speedups(results: list[Result], baseline: Result, path: Path) -> None:
    """Writes a bar for each configuration: mean speed-up, whiskers of one standard deviation, a dot for each seed.

    In tokens and, where times are known, in wall-clock. A configuration that did not get there has no bar, but says so.
    """
    shown = [result for result in results if result is not baseline][::-1]
    styles = _styles(results, baseline)
    panels = {"tokens": "fewer training tokens"}
    if any(result.seconds.mean is not None for result in results):
        panels["seconds"] = "less wall-clock"
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        size = (5.5 * len(panels) + 1.5, 1.3 + 0.45 * len(shown))
        figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
        for ax, (panel, title) in zip(axes[0], panels.items(), strict=True):
            for y, result in enumerate(shown):
                _bar(ax, y, getattr(result.speedup, panel), styles[result.label][0])
            ax.axvline(1, color=BASELINE_COLOUR, linestyle=(0, (5, 4)), linewidth=1)
            ax.set_xlim(0, max(1.1, ax.get_xlim()[1]))
            ax.set_yticks(range(len(shown)), [result.label for result in shown])
            ax.set_xlabel("speed-up over the baseline, × (1 = as fast)")
            ax.set_title(title, loc="left")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _bar(ax: Axes, y: int, summary: Summary, colour: str) -> None:
    values = [value for value in summary.values if value is not None]
    if summary.mean is None:
        reached = f"{len(values)} of {len(summary.values)} seeds" if values else "not reached"
        ax.text(0.02, y, reached, va="center", color=colour)
        return
    ax.barh(y, summary.mean, height=0.55, color=colour, alpha=0.75)
    if summary.sd is not None:
        ax.errorbar(summary.mean, y, xerr=summary.sd, color=BASELINE_COLOUR, capsize=4, linewidth=1.2)
        ax.plot(values, [y] * len(values), "o", markersize=4, color="white", markeredgecolor=BASELINE_COLOUR)
    right = max([*values, summary.mean + (summary.sd or 0)])
    ax.annotate(f"{summary.mean:.2f}×", (right, y), xytext=(6, 0), textcoords="offset points", va="center")
    ax.update_datalim([(1.15 * right, y)])
    ax.autoscale_view()


def plot_convergence(results: list[Result], baseline: Result, path: Path) -> None:
    """Writes a panel over tokens and, where times are known, one over them, as PNG.

    Mean curves, ± one standard deviation over seeds as a band. The dashed line is the baseline's final loss; where a
    curve first crosses it, the speed-up is told.
    """
    styles = _styles(results, baseline)
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        columns = min(len(results), 2)
        height = 4.8 + 0.2 * len(results) / columns
        timed = any(result.seconds.mean is not None for result in results)
        panels: dict[Panel, str] = {"tokens": "by training tokens", **({"seconds": "by wall-clock"} if timed else {})}
        size = (12.5 if timed else 8.5, height)
        figure, grid = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
        axes = grid[0]
        for ax, (panel, title) in zip(axes, panels.items(), strict=True):
            _draw(ax, panel, results, baseline, styles)
            ax.set_title(title, loc="left")
        axes[0].set_ylim(*_limits(results, baseline))
        axes[0].set_ylabel("validation loss (nats per token)")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _draw(ax: Axes, panel: Panel, results: list[Result], baseline: Result, styles: dict[str, tuple[str, str]]) -> None:
    longest = max(float(np.nanmax(getattr(r.mean, panel), initial=0)) for r in results)
    unit = token_unit(longest) if panel == "tokens" else time_unit(longest)
    target = float(baseline.mean.loss[-1])
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.set_xlabel(unit.label)
    ax.axhline(target, color=BASELINE_COLOUR, linestyle=(0, (5, 4)), linewidth=1, zorder=1)
    name = f"{baseline.label}: {target:.4f}"
    ax.text(0.01, target, name, transform=ax.get_yaxis_transform(), va="bottom", fontsize=9, color=BASELINE_COLOUR)
    told = []
    for result in results:
        colour, line = styles[result.label]
        x = getattr(result.mean, panel) / unit.size
        marker = "." if len(x) <= FEW else None
        ax.plot(x, result.mean.loss, line, marker=marker, color=colour, linewidth=1.8, label=_legend(result))
        if len(result.group.counted) > 1:
            low, high = result.mean.loss - result.sd, result.mean.loss + result.sd
            ax.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        at = _position(crossing(result.mean, target), panel)
        if at is not None and result is not baseline:
            told.append((at / unit.size, _speedup_text(getattr(result.speedup, panel)), colour))
    ax.set_xlim(0, longest / unit.size * 1.02)
    _annotate(ax, target, sorted(told), longest / unit.size)


def _annotate(ax: Axes, target: float, told: list[tuple[float, str, str]], width: float) -> None:
    """Marks the crossings and writes their speed-ups on stems to the x axis, staggered where close."""
    level, before = 0, -np.inf
    for x, text, colour in told:
        last = x == told[-1][0] and len(told) > 1 and x < 0.92 * width
        level = (level + 1) % LEVELS if x - before < CLOSE * width and not last else 0
        before = x
        ax.plot([x, x], [0, target], ":", color=colour, linewidth=1.2, zorder=1)
        ax.plot([x], [target], "o", color=colour, markersize=6, markeredgecolor="white", zorder=5)
        ax.annotate(
            text,
            (x, 0),
            xycoords=("data", "axes fraction"),
            xytext=(5 if last else -5, 6 + 15 * level),
            textcoords="offset points",
            ha="left" if last else "right",
            color=colour,
            fontweight="bold",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8},
            zorder=6,
        )


def _limits(results: list[Result], baseline: Result) -> tuple[float, float]:
    """y range of the late part of all curves, with room below for the speed-ups.

    A curve far above the baseline does not count, and may leave the picture.
    """
    late = [r.mean.loss[r.mean.tokens >= LATE * r.mean.tokens[-1]] for r in results]
    low = min(float((r.mean.loss - r.sd).min()) for r in results)
    tops = [float(loss.max()) for loss in late]
    most = low + TALLEST * (tops[results.index(baseline)] - low)
    high = max(top for top in tops if top <= most)
    span = max(high - low, 1e-3)
    return low - 0.2 * span, high + 0.08 * span


def token_unit(most: float) -> Unit:
    """Thousands, millions or billions, by the longest run's tokens."""
    units = ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
    size, name = next(((size, name) for size, name in units if most >= size), (1.0, ""))
    return Unit(f"training tokens ({name})" if name else "training tokens", size)


def time_unit(most: float) -> Unit:
    """Seconds, minutes or hours, by the longest run's seconds."""
    units = ((3 * 3600, 3600, "hours"), (120, 60, "minutes"))
    size, name = next(((size, name) for least, size, name in units if most >= least), (1, "seconds"))
    return Unit(f"training time ({name})", size)


def _styles(results: list[Result], baseline: Result) -> dict[str, tuple[str, str]]:
    """Colour and line of each group; a colour that returns has another line."""
    styles = {baseline.label: (BASELINE_COLOUR, "-")}
    for i, result in enumerate(result for result in results if result is not baseline):
        styles[result.label] = (COLOURS[i % len(COLOURS)], LINES[i // len(COLOURS) % len(LINES)])
    return styles


def _legend(result: Result) -> str:
    loss, seeds = result.final_loss, len(result.group.counted)
    spread = f" ± {loss.sd:.4f} ({seeds} seeds)" if loss.sd is not None else " (1 seed)"
    unfinished = ", unfinished" if result.group.unfinished else ""
    return f"{result.label}: {loss.mean:.4f}{spread}{unfinished}"


def _speedup_text(summary: Summary) -> str:
    if summary.mean is None:
        return f"{summary.reached} of {len(summary.values)} seeds"
    return f"{summary.mean:.2f}×"


def _position(found: Crossing | None, panel: Panel) -> float | None:
    if found is None:
        return None
    return found.tokens if panel == "tokens" else found.seconds
