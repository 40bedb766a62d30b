"""The picture of a comparison: loss over tokens and over time."""

from typing import NamedTuple

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from numpy.typing import NDArray

from anlit.analysis.comparison import Comparison, Result
from anlit.reporting.figure import BASELINE_LINE, INK, TEXT, LineStyle, line_styles, save, style

# The part of the curves, by tokens, that sets the upper end of the y axis.
LATE = 0.2
# Height of the picture at most, in heights of the baseline's late part.
TALLEST = 2.5
# Up to this number of validation points, each is marked.
FEW = 12
# Units of the axes: from which length on, size, name.
TOKENS = ((1e9, 1e9, "billions"), (1e6, 1e6, "millions"), (1e3, 1e3, "thousands"))
SECONDS = ((3 * 3600, 3600, "hours"), (120, 60, "minutes"), (0, 1, "seconds"))


class Panel(NamedTuple):
    """One x axis: its label, and the length of a token of each configuration on it."""

    title: str
    label: str
    per_token: dict[str, float]


def panels_of(comparison: Comparison) -> list[Panel]:
    """A panel over training tokens and, if steps were timed in turns, one over time at their speed."""
    results = comparison.results
    size, name = _unit(max(float(result.mean.tokens[-1]) for result in results), TOKENS)
    tokens = {result.label: 1 / size for result in results}
    panels = [Panel("by training tokens", f"training tokens{name}", tokens)]
    if comparison.steps is None:
        return panels
    seconds = float(np.median(comparison.steps.seconds.get(comparison.baseline.group.key, (np.nan,))))
    per_token = {comparison.baseline.label: seconds}
    for result in comparison.others:
        if result.wall_clock is not None:
            per_token[result.label] = seconds * result.wall_clock.time.median
    size, name = _unit(max(result.mean.tokens[-1] * per_token.get(result.label, 0) for result in results), SECONDS)
    times = {label: value / size for label, value in per_token.items()}
    return [*panels, Panel("by time, at the speed of steps in turns", f"training time{name}", times)]


def plot_convergence(comparison: Comparison) -> None:
    """Writes a panel over tokens and, if steps were timed in turns, one over time.

    The panels have mean curves, with ± one standard deviation over seeds as a band. The dashed line is the baseline's
    final loss. A legend below has losses and speed-ups; nothing is written on the curves.
    """
    results = list(comparison.results)
    drawn = line_styles([result.label for result in results])
    with style(8):
        panels = panels_of(comparison)
        size = (TEXT, 2.9 + 0.16 * (len(results) + 1))
        figure, grid = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
        axes = grid[0]
        for ax, panel in zip(axes, panels, strict=True):
            _draw(ax, panel, results, comparison.baseline, drawn)
        axes[0].set_ylim(*_limits(results, comparison.baseline))
        axes[0].set_ylabel("validation loss (nats per token)")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=1)
        save(figure, comparison.plot)


def _draw(ax: Axes, panel: Panel, results: list[Result], baseline: Result, drawn: dict[str, LineStyle]) -> None:
    target = float(baseline.mean.loss[-1])
    ax.grid()
    ax.set_title(panel.title)
    ax.set_xlabel(panel.label)
    longest = 0.0
    for result in results:
        if result.label not in panel.per_token:
            continue
        look, scale = drawn[result.label], panel.per_token[result.label]
        x: NDArray[np.float64] = result.mean.tokens * scale
        longest = max(longest, float(x[-1]))
        every = max(1, len(x) // FEW)
        ax.plot(x, result.mean.loss, linestyle=look.dash, marker=look.marker, markevery=every, markersize=3.5,
                color=look.colour, linewidth=1.4, label=_legend(result, result is baseline))  # fmt: skip
        if len(result.group.counted) > 1:
            low, high = result.mean.loss - result.sd, result.mean.loss + result.sd
            ax.fill_between(x, low, high, color=look.colour, alpha=0.18, linewidth=0)
    ax.axhline(target, color=INK, linestyle=BASELINE_LINE, linewidth=0.8, zorder=1,
               label=f"{baseline.label}'s final loss; bands: ± standard deviation over seeds")  # fmt: skip
    ax.set_xlim(0, longest * 1.02)


def _limits(results: list[Result], baseline: Result) -> tuple[float, float]:
    """y range of the late part of all curves, with a margin.

    A curve far above the baseline does not count, and may leave the picture.
    """
    late = [r.mean.loss[r.mean.tokens >= LATE * r.mean.tokens[-1]] for r in results]
    low = min(float((r.mean.loss - r.sd).min()) for r in results)
    tops = [float(loss.max()) for loss in late]
    most = low + TALLEST * (tops[results.index(baseline)] - low)
    high = max(top for top in tops if top <= most)
    span = max(high - low, 1e-3)
    return low - 0.08 * span, high + 0.08 * span


def _unit(most: float, units: tuple[tuple[float, float, str], ...]) -> tuple[float, str]:
    """The size and the name of the unit for an axis that ends at `most`."""
    return next(((size, f" ({name})") for least, size, name in units if most >= least), (1.0, ""))


def _legend(result: Result, is_baseline: bool) -> str:
    loss, seeds = result.final_loss, len(result.group.counted)
    spread = f" ± {loss.sd:.4f} ({seeds} seeds)" if loss.sd is not None else " (1 seed)"
    speedup = "" if is_baseline else f", speed-up in tokens {result.speedup.words}"
    unfinished = ", unfinished" if result.group.unfinished else ""
    return f"{result.label}: {loss.mean:.4f}{spread}{speedup}{unfinished}"
