"""The picture of a comparison: loss over tokens and over time."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from anlit.compare.comparison import Comparison, Result, seconds_per_token
from anlit.compare.statistics import mean_sd, partial_reach
from anlit.reporting.figure import (
    BASELINE_LINE,
    INK,
    LETTER_WIDTH,
    TEXT_WIDTH,
    LineStyle,
    line_styles,
    save,
    style,
)
from anlit.reporting.text import count_of, short_number

LATE_SHARE = 0.2
"""The y axis ends at the highest loss after this share of the tokens.

So the steep beginning does not flatten the rest.
"""
MAX_HEIGHT = 2.5
"""The greatest height of the y axis, in heights that the baseline needs.

So a diverged configuration does not flatten the others.
"""
MIN_MARKERS = 12
"""A curve has 12 to 23 markers; with fewer validation points, each is marked."""
MARGIN_LETTERS = 10
"""Letters of a line that the legend's frame and lines take."""
LONG = 3 * 3600
"""Seconds of training above which an axis counts hours, not minutes."""


@dataclass(frozen=True)
class Panel:
    """A panel of the picture.

    Args:
        title: Its title.
        x_label: The label of the x axis.
        per_token: Label of the configuration → length of a token (across tokenizers: of a byte of
            text) on the x axis, in the axis' unit.
            Configurations that are not in it are not drawn.
    """

    title: str
    x_label: str
    per_token: dict[str, float]


def panels_of(comparison: Comparison) -> Iterator[Panel]:
    """A panel over training tokens and, if steps were timed, a panel over training time.

    This time is tokens · seconds per token. `anlit compare --measure_steps` times the steps of all
    configurations in turns. The time that the runs took is not used.
    """
    length = comparison.measure.length
    labels = [result.label for result in comparison.results]
    yield Panel(f"by {length}", length, dict.fromkeys(labels, 1.0))
    if not comparison.steps:
        return
    seconds_by_label = _seconds_per_token(comparison)
    durations = []
    for result in comparison.results:
        curve, _ = result.group.mean()
        durations.append(curve.tokens[-1] * seconds_by_label.get(result.label, 0))
    size, unit = (3600, "hours") if max(durations) > LONG else (60, "minutes")
    per_token = {label: seconds / size for label, seconds in seconds_by_label.items()}
    yield Panel("by time, at the speed of steps in turns", f"training time ({unit})", per_token)


def _seconds_per_token(comparison: Comparison) -> dict[str, float]:
    """Seconds per token or byte of each configuration that was timed."""
    baseline = comparison.baseline
    units_per_token = comparison.measure.units_per_token(baseline.group.counted[0])
    rounds = seconds_per_token(comparison.steps).get(baseline.group.key, [np.nan])
    # rounds: seconds per token in each round of the timing
    seconds = float(np.median(rounds)) / units_per_token
    times = {baseline.label: seconds}
    for result in comparison.results[1:]:
        if result.time is not None:
            times[result.label] = seconds * result.time.median  # `time` is a ratio to the baseline
    return times


def plot_convergence(comparison: Comparison) -> None:
    """Draw mean curves with bands over seeds, and the baseline's final loss."""
    results = comparison.results
    styles = line_styles([result.label for result in results])
    panels = list(panels_of(comparison))
    with style():
        size = (TEXT_WIDTH, 2.9 + 0.16 * (len(results) + 1))
        figure, grid = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
        for ax, panel in zip(grid[0], panels, strict=True):
            _draw_panel(ax, panel, comparison, styles)
        first_ax = grid[0][0]
        first_ax.set(ylim=_limits(results), ylabel=f"validation loss ({comparison.measure.loss})")
        handles, labels = first_ax.get_legend_handles_labels()
        letters = int(TEXT_WIDTH / LETTER_WIDTH) - MARGIN_LETTERS
        labels = [textwrap.fill(label, letters) for label in labels]
        figure.legend(handles, labels, loc="outside lower center", ncols=1)
        save(figure, comparison.plot)


def _draw_panel(
    ax: Axes, panel: Panel, comparison: Comparison, styles: dict[str, LineStyle]
) -> None:
    for result in comparison.results:
        if result.label in panel.per_token:
            is_baseline = result is comparison.baseline
            scale = panel.per_token[result.label]
            _draw_curve(ax, result, scale, styles[result.label], is_baseline)
    if comparison.target is not None:
        ax.axhline(
            comparison.target,
            color=INK,
            linestyle=BASELINE_LINE,
            linewidth=0.8,
            zorder=1,
            label=_legend_of_target(comparison),
        )
    ax.set(title=panel.title, xlabel=panel.x_label)
    ax.set_xlim(left=0)
    ax.xaxis.set_major_formatter(lambda value, _: short_number(value))
    ax.grid()


def _draw_curve(ax: Axes, result: Result, scale: float, line: LineStyle, is_baseline: bool) -> None:
    """Draw a mean curve with a band from the lowest to the highest seed."""
    curve, (low, high) = result.group.mean()
    x = curve.tokens * scale
    ax.plot(
        x,
        curve.loss,
        color=line.colour,
        linestyle=line.dash,
        linewidth=1.4,
        marker=line.marker,
        markersize=3.5,
        markevery=max(1, len(x) // MIN_MARKERS),
        label=_legend(result, is_baseline),
    )
    ax.fill_between(x, low, high, color=line.colour, alpha=0.18, linewidth=0)


def _limits(results: tuple[Result, ...]) -> tuple[float, float]:
    """The y range of the late part of all curves, with a margin.

    `results` begin with the baseline. A curve far above the baseline's may leave the range.
    """
    lows = []
    late_highs = []
    for result in results:
        curve, (lowest, _) = result.group.mean()
        is_late = curve.tokens >= LATE_SHARE * curve.tokens[-1]
        lows.append(float(lowest.min()))
        late_highs.append(float(curve.loss[is_late].max()))
    low = min(lows)
    limit = low + MAX_HEIGHT * (late_highs[0] - low)
    high = max(value for value in late_highs if value <= limit)
    margin = 0.08 * max(high - low, 1e-3)
    return low - margin, high + margin


def _legend(result: Result, is_baseline: bool) -> str:
    """`anGPT, plain: 2.6500 ± 0.0707 (2 seeds), speed-up in tokens 1.52`."""
    text = f"{result.label}: {mean_sd(result.final_loss, 4)}"
    if result.final_loss.mean is not None:
        text += f" ({count_of(len(result.group.counted), 'seed')})"
    if not is_baseline:
        speedup = f"speed-up in {result.group.measure.short_length} {result.speedup.words}"
        text += f", {partial_reach(result.speedup) or speedup}"
    return f"{text}, unfinished" if result.group.unfinished else text


def _legend_of_target(comparison: Comparison) -> str:
    text = f"final loss of {comparison.baseline.label}"
    has_bands = any(len(result.group.counted) > 1 for result in comparison.results)
    return f"{text}; bands: from the lowest to the highest seed" if has_bands else text
