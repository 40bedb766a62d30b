"""The page of `anlit lengths`: tables by length and by position, and their figure."""

import math
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from anlit.compare.statistics import Summary, mean_sd
from anlit.evaluation.runner import Report
from anlit.reporting.figure import (
    SHADE_STYLE,
    SHADED,
    TEXT_WIDTH,
    legend_below,
    line_styles,
    shade,
)
from anlit.reporting.page import listed
from anlit.reporting.table import Table, markdown_table
from anlit.reporting.text import count_of, literal

MIN_POSITION = 8
"""The first position in the figure; losses with less context would stretch the axis too far."""
MAX_TICKS = 5
LINE_SHIFT = 1.035
"""Ratio of the x of neighbouring lines, so that their error bars do not overlap."""
LENGTH_COLUMNS = (
    "configuration",
    "documents masked",
    "length",
    "seeds",
    "loss",
    "standard error",
    "change",
    "its standard error",
    "bits per byte",
    "tokens",
    "sequences",
)
LENGTH_NOTE = """\
Loss is the mean in nats per token over the same {tokens:,} validation tokens at every length; only
the cuts into sequences differ. With more than one seed a value is the mean ± the standard deviation
over seeds. *Standard error* is the error of a run's mean over its blocks of {block:,} tokens; the
mean of these errors if there are several runs. *Change* is the loss minus the loss at the training
length. Both are on the same tokens, so its standard error is as a rule smaller than the error of
the losses. *Bits per byte* has the bytes per token of the whole split."""
POSITION_NOTE = """\
In the figure, at position p the model sees p earlier tokens: of the document if documents are
masked, else of the sequence. Different positions have different tokens, so compare configurations
at the same position. lengths.json has the losses by range of positions."""

Point = tuple[float, float | None, float | None]
"""x, mean and standard deviation over seeds."""


def report_lengths(record: dict[str, Any]) -> Report:
    """Make tables and figure of a record of `anlit lengths`."""
    settings = record["settings"]
    lengths = settings["lengths"]
    tokens = settings["tokens"]
    notes = record.get("notes", [])
    rows = []
    printed_rows = []
    for arm, masked in product(record["arms"], settings["masking"]):
        yes_or_no = "yes" if masked else "no"
        printed_row = [arm["label"], yes_or_no]
        for length in lengths:
            cells = _length_cells(measurements_of_arm(record, arm, length, masked))
            rows.append([literal(arm["label"]), yes_or_no, f"{length:,}", *cells])
            printed_row.append(cells[1])  # the loss
        printed_rows.append(printed_row)
    paragraphs = [
        "# Loss by length",
        "![loss over length and position](lengths.png)",
        markdown_table(LENGTH_COLUMNS, rows),
        LENGTH_NOTE.format(tokens=tokens, block=math.lcm(*lengths)),
        POSITION_NOTE,
    ]
    if notes:
        paragraphs += ["## Notes", listed(notes)]
    table = Table(
        f"Loss in nats per token, by length, on {tokens:,} tokens",
        ["configuration", "documents\nmasked", *(f"{length:,}" for length in lengths)],
        printed_rows,
    )
    figures = {"lengths.png": partial(loss_figure, record)}
    return Report([table], paragraphs, figures, [f"note: {note}" for note in notes])


def measurements_of_arm(
    record: dict[str, Any], arm: dict[str, Any], length: int, masked: bool
) -> list[dict[str, Any]]:
    """The measurement of each seed of an arm at a length and masking."""
    measurements = []
    for checkpoint_index in arm["checkpoints"]:
        for measurement in record["measurements"][checkpoint_index]:
            if measurement["length"] == length and measurement["masking"] == masked:
                measurements.append(measurement)
    return measurements


def _masking_text(masked: bool) -> str:
    return "documents masked" if masked else "documents not masked"


def _length_cells(seeds: list[dict[str, Any]]) -> list[str]:
    """The columns of LENGTH_COLUMNS after the length, from the measurement of each seed."""
    losses = [seed["total"] for seed in seeds]
    changes = [seed["change"] for seed in seeds]
    bits_per_byte = Summary(tuple(seed["bits_per_byte"] for seed in seeds))
    return [
        str(len(seeds)),
        *_loss_and_error(losses),
        *_loss_and_error(changes),
        mean_sd(bits_per_byte, 4),
        f"{losses[0]['tokens']:,}",
        f"{seeds[0]['sequences']:,}",
    ]


def _loss_and_error(estimates: list[dict[str, Any] | None]) -> tuple[str, str]:
    """The loss over seeds, and the mean of their standard errors, as cells.

    A seed that was not measured, or has no tokens, is None. JSON has null for a loss that is not
    finite, which becomes NaN.
    """
    losses: list[float | None] = []
    errors: list[float | None] = []
    for estimate in estimates:
        if not estimate or not estimate["tokens"]:
            losses.append(None)
            errors.append(None)
        else:
            losses.append(math.nan if estimate["loss"] is None else estimate["loss"])
            errors.append(estimate["standard_error"])
    mean_error = Summary(errors).mean
    return mean_sd(Summary(losses), 4), mean_sd(Summary([mean_error]), 4)


def loss_figure(record: dict[str, Any]) -> Figure:
    """Draw a row for documents masked and not masked, with panels by length and by position.

    Points are means over seeds, bars ± one standard deviation. Lengths beyond the training length
    are shaded.
    """
    masking = record["settings"]["masking"]
    lengths = record["settings"]["lengths"]
    arms = record["arms"]
    size = (TEXT_WIDTH, 0.3 + 2.3 * len(masking) + 0.16 * len(arms))
    figure, grid = plt.subplots(
        len(masking), 2, figsize=size, sharex="col", sharey="col", squeeze=False
    )
    handles = _draw_arms(grid, record)
    training_lengths = {model["training_length"] for model in record["checkpoints"]}
    for (length_axes, position_axes), masked in zip(grid, masking, strict=True):
        length_axes.set_title(f"by length, {_masking_text(masked)}")
        position_axes.set_title(f"by position, {_masking_text(masked)}")
        for axes in (length_axes, position_axes):
            axes.set_xscale("log", base=2)
            axes.set_ylabel("loss (nats per token)")
            axes.grid()
            shade(axes, max(training_lengths) * LINE_SHIFT ** (len(arms) / 2))
    lowest_length_axes, lowest_position_axes = grid[-1]
    lowest_length_axes.set_xlabel("sequence length (tokens)")
    lowest_position_axes.set_xlabel(f"earlier tokens that the model sees (of {lengths[-1]:,})")
    for axes in grid[-1]:
        axes.xaxis.set_major_locator(LogLocator(2, numticks=MAX_TICKS + 1))
        axes.xaxis.set_major_formatter("{x:,.0f}")
    if any(len(arm["checkpoints"]) > 1 for arm in arms):
        label = "± standard deviation over seeds"
        handles.append(Line2D([], [], color="0.4", marker="|", linestyle="", label=label))
    shaded = SHADED
    if len(training_lengths) > 1:  # other models are beyond their length before it begins
        label = f"longer than in any training ({' and '.join(map(str, sorted(training_lengths)))})"
        shaded = Patch(**SHADE_STYLE, label=label)
    legend_below(figure, [*handles, shaded])
    return figure


def _draw_arms(grid: Any, record: dict[str, Any]) -> list[Line2D]:
    """Draw a line for each arm into every panel; returns the handles of the legend."""
    arms = record["arms"]
    styles = line_styles([arm["label"] for arm in arms])
    handles = []
    for number, arm in enumerate(arms):
        line_style = styles[arm["label"]]
        shift = LINE_SHIFT ** (number - (len(arms) - 1) / 2)
        style: dict[str, Any] = {
            "color": line_style.colour,
            "marker": line_style.marker,
            "linestyle": line_style.dash,
        }
        for (length_axes, position_axes), masked in zip(
            grid, record["settings"]["masking"], strict=True
        ):
            points = _points_by_length(arm, masked)
            _draw_error_bars(length_axes, points, shift, style)
            longest = record["settings"]["lengths"][-1]
            points = _points_by_position(measurements_of_arm(record, arm, longest, masked))
            _draw_error_bars(position_axes, points, shift, style)
        seeds = count_of(len(arm["checkpoints"]), "seed")
        handles.append(Line2D([], [], label=f"{arm['label']} ({seeds})", **style))
    return handles


def _draw_error_bars(axes: Axes, points: list[Point], shift: float, style: dict[str, Any]) -> None:
    x, mean, sd = np.array(points, dtype=float).T
    axes.errorbar(x * shift, mean, sd, ecolor=(style["color"], 0.7), elinewidth=0.7, **style)


def _points_by_length(arm: dict[str, Any], masked: bool) -> list[Point]:
    points = []
    for loss in arm["loss"]:
        if loss["masking"] == masked:
            points.append((loss["length"], loss["mean"], loss["sd"]))
    return points


def _points_by_position(seeds: list[dict[str, Any]]) -> list[Point]:
    """Points at the middle of each range with tokens, from `MIN_POSITION` on if there are any."""
    ranges = list(zip(*(seed["by_position"] for seed in seeds), strict=True))
    ranges = [spans for spans in ranges if spans[0]["estimate"]["tokens"]]
    late_ranges = [spans for spans in ranges if spans[0]["first"] >= MIN_POSITION]
    points: list[Point] = []
    for spans in late_ranges or ranges:
        loss = Summary([span["estimate"]["loss"] for span in spans])
        middle = math.sqrt(max(0.5, spans[0]["first"]) * spans[0]["end"])
        points.append((middle, loss.mean, loss.sd))
    return points
