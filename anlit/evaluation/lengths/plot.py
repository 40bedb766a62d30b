"""The figure of `anlit lengths`: loss over the length, and over the position at the longest length."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from anlit.evaluation.arms import Arm, mean_and_sd
from anlit.evaluation.lengths.measure import Measurement
from anlit.evaluation.lengths.report import Results, by_document, by_position
from anlit.evaluation.lengths.tally import RangeLoss
from anlit.reporting.figure import Look, looks, save, style

STYLES: dict[bool, Literal["-", "--"]] = {True: "-", False: "--"}
MASKED = {True: "documents masked", False: "not masked"}
# The first positions have almost no context. Their losses are so large that other differences would not be visible.
FIRST_SHOWN = 8
FEWEST_SHOWN = 3


def plot(results: Results, training_lengths: list[int], file: Path) -> None:
    """Write the panels as PNG: by length, by position in the sequence, and with masking by position in the document.

    Points are means over seeds, bands ± one standard deviation over seeds. The standard errors over sequences are in
    the tables; each panel by position shows the largest.
    """
    panels = 3 if True in results.masking else 2
    legend = _legend(results)
    columns = min(len(legend), 2 if panels == 2 else 3)
    height = 4.5 + 0.25 * math.ceil(len(legend) / columns)
    with style():
        figure, axes = plt.subplots(1, panels, figsize=(4.8 * panels, height))
        _draw_lengths(axes[0], results)
        label = f"position (tokens; sequences of {results.lengths[-1]:,})"
        _draw_ranges(axes[1], results, results.masking, by_position, training_lengths)
        axes[1].set_title("by position in the sequence", loc="left")
        axes[1].set_xlabel(label)
        if panels == 3:
            _draw_ranges(axes[2], results, [True], by_document, training_lengths)
            axes[2].set_title("by position in the document", loc="left")
            axes[2].set_xlabel(label)
            axes[2].sharey(axes[1])
            axes[2].autoscale(axis="y")
        for ax in axes[:2]:
            ax.set_ylabel("validation loss (nats per token)")
        figure.legend(handles=legend, loc="outside lower center", ncols=columns)
        save(figure, file)


def _draw_lengths(ax: Axes, results: Results) -> None:
    x, drawn = np.log2(results.lengths), _looks(results)
    for arm in results.arms:
        for masked in results.masking:
            of_lengths = [results.of_arm(arm, length, masked) for length in results.lengths]
            seeds = [[one.total.loss for one in of_seeds] for of_seeds in of_lengths]
            _line(ax, x, [mean_and_sd(losses) for losses in seeds], drawn[arm.label], masked)
    ax.set_xticks(x, [f"{length:,}" for length in results.lengths])
    ax.set_title("by length, the same tokens", loc="left")
    ax.set_xlabel("sequence length (tokens)")
    ax.grid()


def _draw_ranges(
    ax: Axes,
    results: Results,
    masking: list[bool],
    kind: Callable[[Measurement], list[RangeLoss]],
    training_lengths: list[int],
) -> None:
    """Draw each range at its middle on the logarithmic axis."""
    shown = _shown(kind(results.of_arm(results.arms[0], results.lengths[-1], masking[0])[0]))
    drawn, largest = _looks(results), 0.0
    for arm in results.arms:
        for masked in masking:
            seeds = [kind(one) for one in results.of_arm(arm, results.lengths[-1], masked)]
            bounds = [seeds[0][k] for k in shown]
            x = np.array([_middle(part) for part in bounds])
            points = [mean_and_sd([ranges[k].estimate.loss for ranges in seeds]) for k in shown]
            _line(ax, x, points, drawn[arm.label], masked)
            errors = [mean_and_sd([ranges[k].estimate.standard_error for ranges in seeds])[0] for k in shown]
            largest = max([largest, *(error for error in errors if error is not None and math.isfinite(error))])
    ax.text(0.99, 0.99, f"standard errors ≤ {largest:.2g}", transform=ax.transAxes, ha="right", va="top",
            color="0.35", fontsize=8.5)  # fmt: skip
    edges = sorted({part.first for part in bounds} | {bounds[-1].end})
    every = math.ceil(len(edges) / 7)
    ticks = [edge for edge in edges[::-1][::every] if edge > 0]
    ax.set_xticks(np.log2(ticks), [f"{edge:,}" for edge in ticks])
    ax.grid()
    for length in training_lengths:
        _mark(ax, length, bounds)


def _mark(ax: Axes, length: int, bounds: list[RangeLoss]) -> None:
    """Draw a vertical line at the training length, if it is inside the panel."""
    if not bounds[0].first < length < bounds[-1].end:
        return
    ax.axvline(math.log2(length), color="0.45", linestyle=":", linewidth=1.2, zorder=1)
    ax.text(
        math.log2(length),
        0.99,
        " training length",
        transform=ax.get_xaxis_transform(),
        va="top",
        color="0.35",
        fontsize=9,
    )


def _shown(ranges: list[RangeLoss]) -> list[int]:
    """Indices of the ranges to draw: those with tokens, without the first positions if enough others are left."""
    full = [k for k, part in enumerate(ranges) if part.estimate.tokens]
    later = [k for k in full if ranges[k].first >= FIRST_SHOWN]
    return later if len(later) >= FEWEST_SHOWN else full


def _middle(part: RangeLoss) -> float:
    """log₂ of the range's middle; position 0 is at −0.5."""
    return (math.log2(part.first) + math.log2(part.end)) / 2 if part.first else -0.5


def _line(ax: Axes, x: np.ndarray, points: list[tuple[float | None, float | None]], look: Look, masked: bool) -> None:
    mean = np.array([np.nan if value is None else value for value, _ in points])
    sd = np.array([np.nan if value is None else value for _, value in points])
    ax.plot(x, mean, STYLES[masked], marker=look.marker, markersize=4.5, color=look.colour, linewidth=1.7)
    ax.fill_between(x, mean - sd, mean + sd, color=look.colour, alpha=0.18, linewidth=0)


def _looks(results: Results) -> dict[str, Look]:
    return looks([arm.label for arm in results.arms])


def _legend(results: Results) -> list[Line2D]:
    drawn = _looks(results)
    lines = [
        Line2D([], [], color=drawn[arm.label].colour, marker=drawn[arm.label].marker, label=_name(arm))
        for arm in results.arms
    ]
    styles = [Line2D([], [], color="0.4", linestyle=STYLES[masked], label=MASKED[masked]) for masked in results.masking]
    spreads = []
    if any(len(arm.members) > 1 for arm in results.arms):
        spreads.append(Line2D([], [], color="0.4", alpha=0.3, linewidth=8, label="± standard deviation over seeds"))
    return [*lines, *styles, *spreads]


def _name(arm: Arm) -> str:
    n = len(arm.members)
    return f"{arm.label} ({n} seed{'s' if n > 1 else ''})"
