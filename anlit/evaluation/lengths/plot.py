"""The figure of `anlit lengths`: loss over the length, and over the position at the longest length."""

import math
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from anlit.evaluation.arms import Arm
from anlit.evaluation.lengths.tables import Results
from anlit.evaluation.lengths.tally import RangeLoss
from anlit.reporting.figure import LineStyle, line_styles, save, style
from anlit.reporting.intervals import Summary

STYLES: dict[bool, Literal["-", "--"]] = {True: "-", False: "--"}
MASKED = {True: "documents masked", False: "not masked"}
# The first positions have almost no context. Their losses are so large that other differences would not be visible.
FIRST_SHOWN = 8
FEWEST_SHOWN = 3


def plot(results: Results, training_lengths: list[int], file: Path) -> None:
    """Write the two panels as PNG and PDF: by length, and by position.

    Points are means over seeds, bands ± one standard deviation over seeds. The standard errors over sequences are in
    the tables; the panel by position shows the largest.
    """
    legend = _legend(results)
    columns = min(len(legend), 2)
    with style():
        figure, axes = plt.subplots(1, 2, figsize=(9.6, 4.5 + 0.25 * math.ceil(len(legend) / columns)))
        _draw_lengths(axes[0], results)
        _draw_ranges(axes[1], results, training_lengths)
        for ax in axes:
            ax.set_ylabel("validation loss (nats per token)")
            ax.grid()
        figure.legend(handles=legend, loc="outside lower center", ncols=columns)
        save(figure, file)


def _draw_lengths(ax: Axes, results: Results) -> None:
    x, drawn = np.log2(results.lengths), line_styles([arm.label for arm in results.arms])
    for arm in results.arms:
        for masked in results.masking:
            of_lengths = [results.of_arm(arm, length, masked) for length in results.lengths]
            losses = [Summary(tuple(one.total.loss for one in of_seeds)) for of_seeds in of_lengths]
            _line(ax, x, losses, drawn[arm.label], masked)
    ax.set_xticks(x, [f"{length:,}" for length in results.lengths])
    ax.set_title("by length, the same tokens", loc="left")
    ax.set_xlabel("sequence length (tokens)")


def _draw_ranges(ax: Axes, results: Results, training_lengths: list[int]) -> None:
    """Draw each range at its middle on the logarithmic axis."""
    drawn, largest = line_styles([arm.label for arm in results.arms]), 0.0
    bounds: dict[int, RangeLoss] = {}
    for arm in results.arms:
        for masked in results.masking:
            seeds = [one.by_position for one in results.of_arm(arm, results.lengths[-1], masked)]
            shown = _shown(seeds[0])
            bounds |= {k: seeds[0][k] for k in shown}
            points = [Summary(tuple(ranges[k].estimate.loss for ranges in seeds)) for k in shown]
            _line(ax, np.array([_middle(seeds[0][k]) for k in shown]), points, drawn[arm.label], masked)
            errors = [Summary(tuple(ranges[k].estimate.standard_error for ranges in seeds)).mean for k in shown]
            largest = max([largest, *(error for error in errors if error is not None and math.isfinite(error))])
    edges = sorted({edge for part in bounds.values() for edge in (part.first, part.end)})
    every = math.ceil(len(edges) / 7)
    ticks = [edge for edge in edges[::-1][::every] if edge > 0]
    ax.set_xticks(np.log2(ticks), [f"{edge:,}" for edge in ticks])
    ax.set_title(f"by position (standard errors ≤ {largest:.2g})", loc="left")
    ax.set_xlabel(f"earlier tokens that the model sees (sequences of {results.lengths[-1]:,})")
    for length in training_lengths:
        if edges[0] < length < edges[-1]:
            ax.axvline(math.log2(length), color="0.45", linestyle=":", linewidth=1.2, zorder=1)
            ax.text(math.log2(length), 0.99, " training length", transform=ax.get_xaxis_transform(), va="top",
                    color="0.35", fontsize=9)  # fmt: skip


def _shown(ranges: list[RangeLoss]) -> list[int]:
    """Indices of the ranges to draw: those with tokens, without the first positions if enough others are left."""
    full = [k for k, part in enumerate(ranges) if part.estimate.tokens]
    later = [k for k in full if ranges[k].first >= FIRST_SHOWN]
    return later if len(later) >= FEWEST_SHOWN else full


def _middle(part: RangeLoss) -> float:
    """log₂ of the range's middle; position 0 is at −0.5."""
    return (math.log2(part.first) + math.log2(part.end)) / 2 if part.first else -0.5


def _line(ax: Axes, x: np.ndarray, points: list[Summary], look: LineStyle, masked: bool) -> None:
    mean, sd = (np.array(values, dtype=float) for values in zip(*((one.mean, one.sd) for one in points), strict=True))
    ax.plot(x, mean, STYLES[masked], marker=look.marker, markersize=4.5, color=look.colour, linewidth=1.7)
    ax.fill_between(x, mean - sd, mean + sd, color=look.colour, alpha=0.18, linewidth=0)


def _legend(results: Results) -> list[Line2D]:
    drawn = line_styles([arm.label for arm in results.arms])
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
