"""The picture of a comparison: loss over tokens and over time."""

from typing import NamedTuple

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from anlit.analysis.comparison import Comparison, Result
from anlit.reporting.figure import BASELINE_LINE, INK, TEXT, LineStyle, line_styles, save, style

LATE, TALLEST = 0.2, 2.5
"""The y axis ends at the highest loss after this share of the tokens, at most at this multiple of the baseline's."""
FEW = 12
"""Up to this number of validation points, each is marked."""
Units = tuple[tuple[float, float, str], ...]
TOKENS: Units = ((1e9, 1e9, " (billions)"), (1e6, 1e6, " (millions)"), (1e3, 1e3, " (thousands)"))
SECONDS: Units = ((3 * 3600, 3600, " (hours)"), (120, 60, " (minutes)"), (0, 1, " (seconds)"))
"""Units of an axis: from which length on, size, name."""


class Panel(NamedTuple):
    """One x axis: its label, and the length of a token of each configuration on it."""

    title: str
    label: str
    per_token: dict[str, float]


def panels_of(comparison: Comparison) -> list[Panel]:
    """A panel over training tokens and, if steps were timed in turns, one over time at their speed."""
    tokens = {result.label: 1.0 for result in comparison.results}
    panels = [_panel("by training tokens", "training tokens", tokens, comparison, TOKENS)]
    if comparison.steps is None:
        return panels
    seconds = float(np.median(comparison.steps.seconds.get(comparison.baseline.group.key, (np.nan,))))
    times = {result.label: seconds * result.time.median for result in comparison.others if result.time is not None}
    times |= {comparison.baseline.label: seconds}
    return [*panels, _panel("by time, at the speed of steps in turns", "training time", times, comparison, SECONDS)]


def _panel(title: str, label: str, per_token: dict[str, float], comparison: Comparison, units: Units) -> Panel:
    longest = max(float(result.mean.tokens[-1]) * per_token.get(result.label, 0) for result in comparison.results)
    size, name = next(((size, name) for least, size, name in units if longest >= least), (1.0, ""))
    return Panel(title, label + name, {label: value / size for label, value in per_token.items()})


def plot_convergence(comparison: Comparison) -> None:
    """Writes a panel over tokens and, if steps were timed in turns, one over time.

    The panels have mean curves, with ± one standard deviation over seeds as a band. The dashed line is the baseline's
    final loss. A legend below has losses and speed-ups; nothing is written on the curves.
    """
    results = comparison.results
    styles = line_styles([result.label for result in results])
    with style(8):
        panels = panels_of(comparison)
        size = (TEXT, 2.9 + 0.16 * (len(results) + 1))
        figure, grid = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
        axes = grid[0]
        for ax, panel in zip(axes, panels, strict=True):
            _draw(ax, panel, comparison, styles)
        axes[0].set_ylim(*_limits(results))
        axes[0].set_ylabel("validation loss (nats per token)")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=1)
        save(figure, comparison.plot)


def _draw(ax: Axes, panel: Panel, comparison: Comparison, styles: dict[str, LineStyle]) -> None:
    ax.grid()
    ax.set(title=panel.title, xlabel=panel.label)
    longest = 0.0
    for result in (result for result in comparison.results if result.label in panel.per_token):
        look, x, loss = styles[result.label], result.mean.tokens * panel.per_token[result.label], result.mean.loss
        longest = max(longest, float(x[-1]))
        ax.plot(x, loss, linestyle=look.dash, marker=look.marker, markevery=max(1, len(x) // FEW), markersize=3.5,
                color=look.colour, linewidth=1.4, label=_legend(result, result is comparison.baseline))  # fmt: skip
        if len(result.group.counted) > 1:
            ax.fill_between(x, loss - result.sd, loss + result.sd, color=look.colour, alpha=0.18, linewidth=0)
    ax.axhline(float(comparison.baseline.mean.loss[-1]), color=INK, linestyle=BASELINE_LINE, linewidth=0.8, zorder=1,
               label=f"{comparison.baseline.label}'s final loss; bands: ± standard deviation over seeds")  # fmt: skip
    ax.set_xlim(0, longest * 1.02)


def _limits(results: tuple[Result, ...]) -> tuple[float, float]:
    """y range of the late part of all curves, with a margin.

    A curve far above the baseline, which is the first, does not count and may leave the picture.
    """
    tops = [float(each.mean.loss[each.mean.tokens >= LATE * each.mean.tokens[-1]].max()) for each in results]
    low = min(float((each.mean.loss - each.sd).min()) for each in results)
    high = max(top for top in tops if top <= low + TALLEST * (tops[0] - low))
    margin = 0.08 * max(high - low, 1e-3)
    return low - margin, high + margin


def _legend(result: Result, is_baseline: bool) -> str:
    loss, seeds = result.final_loss, len(result.group.counted)
    spread = f" ± {loss.sd:.4f} ({seeds} seeds)" if loss.sd is not None else " (1 seed)"
    speedup = "" if is_baseline else f", speed-up in tokens {result.speedup.words}"
    unfinished = ", unfinished" if result.group.unfinished else ""
    return f"{result.label}: {loss.mean:.4f}{spread}{speedup}{unfinished}"
