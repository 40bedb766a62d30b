"""The picture of a comparison: loss over tokens and over time."""

from typing import NamedTuple

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from numpy.typing import NDArray

from anlit.analysis.results import Report, Result
from anlit.analysis.speedup import crossing
from anlit.reporting.figure import BASELINE_LINE, INK, Look, looks, save, style

# The part of the curves, by tokens, that sets the upper end of the y axis.
LATE = 0.2
# Height of the picture at most, in heights of the baseline's late part.
TALLEST = 2.5
# Crossings nearer than this share of the axis have labels on different levels.
CLOSE, LEVELS = 0.13, 3
# Up to this number of validation points, each is marked.
FEW = 12
# Units of the axes: from which length on, size, name.
TOKENS = ((1e9, 1e9, "billions"), (1e6, 1e6, "millions"), (1e3, 1e3, "thousands"))
SECONDS = ((3 * 3600, 3600, "hours"), (120, 60, "minutes"), (0, 1, "seconds"))


class Panel(NamedTuple):
    """One x axis: its label, the length of a token of each configuration on it, and the speed-ups in words."""

    title: str
    label: str
    per_token: dict[str, float]
    speedups: dict[str, str]


def panels_of(report: Report) -> list[Panel]:
    """A panel over training tokens and, if steps were timed in turns, one over time at their speed."""
    results = report.results
    size, name = _unit(max(float(result.mean.tokens[-1]) for result in results), TOKENS)
    told = {result.label: result.speedup.tokens.words for result in results}
    tokens = {result.label: 1 / size for result in results}
    found = [Panel("by training tokens", f"training tokens{name}", tokens, told)]
    if report.paired is None:
        return found
    seconds = float(np.median(report.paired.seconds.get(report.baseline.group.key, (np.nan,))))
    per_token, told = {report.baseline.label: seconds}, {}
    for claim in report.claims:
        if claim.wall_clock is not None:
            per_token[claim.result.label] = seconds * claim.wall_clock.time.median
            faster = claim.wall_clock.speedup
            told[claim.result.label] = f"{faster.median:.2f}×" if faster else claim.result.speedup.tokens.words
    size, name = _unit(max(result.mean.tokens[-1] * per_token.get(result.label, 0) for result in results), SECONDS)
    times = {label: value / size for label, value in per_token.items()}
    return [*found, Panel("by time, at the speed of steps in turns", f"training time{name}", times, told)]


def plot_convergence(report: Report) -> None:
    """Writes a panel over tokens and, if steps were timed in turns, one over time.

    The panels have mean curves, with ± one standard deviation over seeds as a band. The dashed line is the baseline's
    final loss. The speed-up is written where a curve first crosses it.
    """
    results = list(report.results)
    drawn = looks([result.label for result in results])
    with style():
        panels = panels_of(report)
        columns = min(len(results), len(panels))  # an entry is about as wide as a panel
        height = 4.8 + 0.2 * len(results) / columns
        size = (6.25 * len(panels) if len(panels) > 1 else 8.5, height)
        figure, grid = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
        axes = grid[0]
        for ax, panel in zip(axes, panels, strict=True):
            _draw(ax, panel, results, report.baseline, drawn)
        axes[0].set_ylim(*_limits(results, report.baseline))
        axes[0].set_ylabel("validation loss (nats per token)")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        save(figure, report.plot)


def _draw(ax: Axes, panel: Panel, results: list[Result], baseline: Result, drawn: dict[str, Look]) -> None:
    target = float(baseline.mean.loss[-1])
    ax.grid()
    ax.set_title(panel.title)
    ax.set_xlabel(panel.label)
    ax.axhline(target, color=INK, linestyle=BASELINE_LINE, linewidth=1, zorder=1)
    name = f"{baseline.label}: {target:.4f}"
    ax.text(0.01, target, name, transform=ax.get_yaxis_transform(), va="bottom", fontsize=9, color=INK)
    told, longest = [], 0.0
    for result in results:
        if result.label not in panel.per_token:
            continue
        look, scale = drawn[result.label], panel.per_token[result.label]
        x: NDArray[np.float64] = result.mean.tokens * scale
        longest = max(longest, float(x[-1]))
        every = max(1, len(x) // FEW)
        ax.plot(x, result.mean.loss, linestyle=look.dash, marker=look.marker, markevery=every, markersize=4.5,
                color=look.colour, linewidth=1.7, label=_legend(result))  # fmt: skip
        if len(result.group.counted) > 1:
            low, high = result.mean.loss - result.sd, result.mean.loss + result.sd
            ax.fill_between(x, low, high, color=look.colour, alpha=0.18, linewidth=0)
        at = crossing(result.mean, target)
        if at is not None and result is not baseline:
            told.append((at.tokens * scale, panel.speedups[result.label], look.colour))
    ax.set_xlim(0, longest * 1.02)
    _annotate(ax, target, sorted(told), longest)


def _annotate(ax: Axes, target: float, told: list[tuple[float, str, str]], width: float) -> None:
    """Marks the crossings, and writes their speed-ups on stems to the x axis, on different levels if they are close."""
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


def _unit(most: float, units: tuple[tuple[float, float, str], ...]) -> tuple[float, str]:
    """The size and the name of the unit for an axis that ends at `most`."""
    return next(((size, f" ({name})") for least, size, name in units if most >= least), (1.0, ""))


def _legend(result: Result) -> str:
    loss, seeds = result.final_loss, len(result.group.counted)
    spread = f" ± {loss.sd:.4f} (band: ± sd of {seeds} seeds)" if loss.sd is not None else " (1 seed)"
    unfinished = ", unfinished" if result.group.unfinished else ""
    return f"{result.label}: {loss.mean:.4f}{spread}{unfinished}"
