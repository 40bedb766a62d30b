"""The picture of a comparison: loss over tokens and over time."""

import textwrap

import numpy as np
from matplotlib import pyplot as plt

from anlit.compare.comparison import Comparison, Result, seconds_per_token
from anlit.compare.statistics import mean_sd
from anlit.reporting.figure import (
    BASELINE_LINE,
    INK,
    LETTER_WIDTH,
    TEXT_WIDTH,
    line_styles,
    save,
    style,
)

LATE, TALLEST = 0.2, 2.5
"""The y axis ends at the highest loss after this share of the tokens, at most at this multiple of the baseline's."""
FEW = 12
"""Up to this number of validation points, each is marked."""
Units = tuple[tuple[float, float, str], ...]
TOKENS: Units = (
    (1e9, 1e9, " (billions)"),
    (1e6, 1e6, " (millions)"),
    (1e3, 1e3, " (thousands)"),
    (0, 1, ""),
)
SECONDS: Units = ((3 * 3600, 3600, " (hours)"), (120, 60, " (minutes)"), (0, 1, " (seconds)"))
"""Units of an axis: from which length on, size, name."""


def panels_of(comparison: Comparison) -> list[tuple[str, str, dict[str, float]]]:
    """Title, label of the x axis, and length of a token of each configuration: over training tokens and, if steps were
    timed in turns, over time at their speed.
    """
    axes = [
        (
            "by training tokens",
            "training tokens",
            {result.label: 1.0 for result in comparison.results},
            TOKENS,
        )
    ]
    if comparison.steps:
        seconds = float(
            np.median(
                seconds_per_token(comparison.steps).get(comparison.baseline.group.key, (np.nan,))
            )
        )
        times = {comparison.baseline.label: seconds}
        times |= {
            result.label: seconds * result.time.median
            for result in comparison.results[1:]
            if result.time is not None
        }
        axes.append(("by time, at the speed of steps in turns", "training time", times, SECONDS))
    panels = []
    for title, label, per_token, units in axes:
        longest = max(float(each.group.mean()[0].tokens[-1]) * per_token.get(each.label, 0)
                      for each in comparison.results)  # fmt: skip
        size, unit = next(
            ((size, unit) for least, size, unit in units if longest >= least), (1.0, "")
        )
        panels.append(
            (title, label + unit, {name: value / size for name, value in per_token.items()})
        )
    return panels


def plot_convergence(comparison: Comparison) -> None:
    """Writes the panels with mean curves, ± one standard deviation over seeds as bands, the baseline's final loss."""
    results, baseline = comparison.results, comparison.baseline
    styles, panels = line_styles([result.label for result in results]), panels_of(comparison)
    several = any(len(result.group.counted) > 1 for result in results)
    bands = "; bands: ± standard deviation over seeds" * several
    with style(8):
        size = (TEXT_WIDTH, 2.9 + 0.16 * (len(results) + 1))
        figure, ((first, *rest),) = plt.subplots(
            1, len(panels), figsize=size, sharey=True, squeeze=False
        )
        for ax, (title, label, per_token) in zip((first, *rest), panels, strict=True):
            longest = 0.0
            for result in (result for result in results if result.label in per_token):
                curve, sd = result.group.mean()
                look, x = styles[result.label], curve.tokens * per_token[result.label]
                longest = max(longest, x[-1])
                ax.plot(x, curve.loss, color=look.colour, linestyle=look.dash, linewidth=1.4, marker=look.marker,
                        markersize=3.5, markevery=max(1, len(x) // FEW),
                        label=_legend(result, result is baseline))  # fmt: skip
                ax.fill_between(
                    x, curve.loss - sd, curve.loss + sd, color=look.colour, alpha=0.18, linewidth=0
                )
            if comparison.target is not None:
                ax.axhline(comparison.target, color=INK, linestyle=BASELINE_LINE, linewidth=0.8, zorder=1,
                           label=f"final loss of {baseline.label}{bands}")  # fmt: skip
            ax.set(title=title, xlabel=label, xlim=(0, longest * 1.02))
            ax.grid()
        first.set(ylim=_limits(results), ylabel="validation loss (nats per token)")
        handles, labels = first.get_legend_handles_labels()
        labels = [textwrap.fill(label, int(TEXT_WIDTH / LETTER_WIDTH) - 10) for label in labels]
        figure.legend(handles, labels, loc="outside lower center", ncols=1)
        save(figure, comparison.plot)


def _limits(results: tuple[Result, ...]) -> tuple[float, float]:
    """y range of the late part of all curves, with a margin; one far above the baseline's, the first, may leave it."""
    curves = [result.group.mean() for result in results]
    tops = [float(curve.loss[curve.tokens >= LATE * curve.tokens[-1]].max()) for curve, _ in curves]
    low = min(float((curve.loss - sd).min()) for curve, sd in curves)
    high = max(top for top in tops if top <= low + TALLEST * (tops[0] - low))
    margin = 0.08 * max(high - low, 1e-3)
    return low - margin, high + margin


def _legend(result: Result, is_baseline: bool) -> str:
    loss, n = result.final_loss, len(result.group.counted)
    seeds = f" ({n} seed{'s' * (n > 1)})" if loss.mean is not None else ""
    speedup = "" if is_baseline else f", speed-up in tokens {result.speedup.words}"
    return f"{result.label}: {mean_sd(loss, 4)}{seeds}{speedup}{', unfinished' * result.group.unfinished}"
