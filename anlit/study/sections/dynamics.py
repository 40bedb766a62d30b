"""The section `dynamics`: the loss, and the metrics of `TrainingDynamics`, over training."""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from anlit.io.metrics_csv import parse_cell, read_rows
from anlit.reporting.figure import (
    TEXT_WIDTH,
    LineStyle,
    legend_below,
    line_styles,
    panels,
    save,
    style,
)
from anlit.reporting.table import NONE, markdown_table
from anlit.reporting.text import minus
from anlit.runs.folders import METRICS, Run
from anlit.study.results import StudyResults

MetricCurve = dict[float, float]
"""Optimizer steps done → value."""
Metrics = dict[str, MetricCurve]
"""Name of the metric → its curve."""
LAST_LAYER = "last"
"""Stands in a metric's name for the deepest layer that a run logged, such as `layer_11`."""
INDUCTION_GAIN = "induction_gain"
"""`copying/first` minus `copying/second`, in nats per token.

They are the losses on random tokens and on the same tokens once more.
"""
AXIS_LABELS = {
    "val/loss": "validation loss (nats per token)",
    INDUCTION_GAIN: "nats that a copy of random tokens saves",
    f"hidden/{LAST_LAYER}/norm": "‖h‖ after the last block",
    f"hidden/{LAST_LAYER}/norm_spread": "its spread over tokens (sd / mean)",
    f"hidden/{LAST_LAYER}/norm_max": "the longest token's ‖h‖ after the last block",
    f"hidden/{LAST_LAYER}/step": "the last block's step ‖h′ − h‖ / ‖h‖",
    "norms/share_at_bound": "share of rows at their bound",
    "rotation/W_q": "rotation of W_q's rows per step (radians)",
    "rotation/W_d": "rotation of W_d's rows per step (radians)",
    "rotation/head": "rotation of the head's rows per step (radians)",
}
"""The metrics, a panel each: name → title. A metric that no run logged has no panel."""
N_MARKERS = 6
"""Markers on a line."""
TITLE_WIDTH = 30
"""Characters in a line of a panel's title."""


def dynamics(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """A figure with a panel per metric over the steps, and a table of last values.

    They are means over the finished seeds that log the metrics. The option `arms` has the names of
    the arms to show; by default all.
    """
    seeds_by_title: dict[str, list[Metrics]] = {}
    counts: list[str] = []
    for arm in results.study.arms:
        metrics_of_seeds = [read_metrics(run) for run in results.runs_of(arm) if run.complete]
        # A run that was restored from a record has one metric, the loss.
        logging_seeds = [metrics for metrics in metrics_of_seeds if len(metrics) > 1]
        if logging_seeds and arm.is_named_in(options.get("arms")):
            seeds_by_title[arm.title] = logging_seeds
            counts.append(f"{len(logging_seeds)} of {len(metrics_of_seeds)}")
    if not seeds_by_title:
        return [
            "## Training dynamics",
            "No finished run logged them: add `trainer/dynamics.yaml` to the study.",
        ]
    means = {title: mean_over_seeds(seeds) for title, seeds in seeds_by_title.items()}
    logged_names = set().union(*means.values())
    names = [name for name in AXIS_LABELS if name in logged_names]
    _draw_panels(names, means, seeds_by_title, results.output / "dynamics.png")
    rows = [["seeds that logged them", *counts]]
    for name in names:
        rows.append([AXIS_LABELS[name], *(_cell(name, metrics) for metrics in means.values())])
    return [
        "## Training dynamics",
        "Thin lines are seeds; thick lines and the table are their means. A rotation is the mean "
        "angle by which an optimizer step turned a row. A copy saves the loss per token on random "
        "tokens minus the loss on the same tokens once more.",
        "![training dynamics](dynamics.png)",
        markdown_table(["at the end of training; rotations: mean over training", *means], rows),
    ]


def read_metrics(run: Run) -> Metrics:
    """Read the metrics of the panels that a run logged."""
    path = run.folder / METRICS
    metrics: Metrics = {}
    columns: dict[str, str] = {}
    for row in read_rows(path) if path.exists() else []:
        columns = columns or columns_of_metrics(row)
        for name, column in columns.items():
            if not row.get(column):
                continue
            value = parse_cell(row, column, path)
            if name == INDUCTION_GAIN:
                value = parse_cell(row, "copying/first", path) - value
            # The log counts steps from 0.
            step = parse_cell(row, "step", path) + 1
            metrics.setdefault(name, {})[step] = value
    return metrics


def columns_of_metrics(names: Iterable[str]) -> dict[str, str]:
    """The column that each metric is read from, from all columns of a file."""
    layers = [name.split("/")[1] for name in names if name.startswith("hidden/")]
    # Numbers have two digits, or three from 100 layers on.
    deepest = max(layers, default=LAST_LAYER, key=lambda layer: (len(layer), layer))
    columns = {name: name.replace(LAST_LAYER, deepest) for name in AXIS_LABELS}
    return columns | {INDUCTION_GAIN: "copying/second"}


def mean_over_seeds(seeds: Sequence[Metrics]) -> Metrics:
    """The mean of each metric at the steps that all seeds have."""
    means: Metrics = {}
    for name in AXIS_LABELS:
        curves = [metrics[name] for metrics in seeds if name in metrics]
        if curves:
            steps = sorted(set.intersection(*map(set, curves)))
            means[name] = {}
            for step in steps:
                values = [curve[step] for curve in curves]
                means[name][step] = float(np.mean(values))
    return means


def _draw_panels(
    names: list[str],
    means: dict[str, Metrics],
    seeds_by_title: dict[str, list[Metrics]],
    path: Path,
) -> None:
    """Draw a panel for each metric: each arm's mean over its seeds, and thinner its seeds."""
    styles = line_styles(list(means))
    with style():
        figure, all_axes = panels(len(names), 3, TEXT_WIDTH / 3, 1.9)
        for axes, name in zip(all_axes, names, strict=True):
            for title, metrics in means.items():
                if name in metrics:
                    seeds = [seed[name] for seed in seeds_by_title[title] if name in seed]
                    _draw_arm(axes, title, metrics[name], seeds, styles[title])
            axes.set(title="\n".join(textwrap.wrap(AXIS_LABELS[name], TITLE_WIDTH)), xlabel="step")
            axes.locator_params(axis="x", nbins=4)
            if name.startswith("rotation/") or name.endswith(("/norm", "/norm_max")):
                axes.set_yscale("log")
        handles, _ = all_axes[0].get_legend_handles_labels()
        legend_below(figure, handles, columns=3)
        save(figure, path)


def _draw_arm(
    axes: Axes, title: str, mean: MetricCurve, seeds: Sequence[MetricCurve], look: LineStyle
) -> None:
    """Draw thin lines for the seeds, and their mean with markers."""
    line: dict[str, Any] = {"color": look.colour, "linestyle": look.dash}
    for curve in seeds:
        axes.plot(list(curve), list(curve.values()), linewidth=0.4, alpha=0.5, **line)
    axes.plot(
        list(mean),
        list(mean.values()),
        label=title,
        linewidth=1.2,
        marker=look.marker,
        markersize=3,
        markevery=max(1, len(mean) // N_MARKERS),
        **line,
    )


def _cell(name: str, metrics: Metrics) -> str:
    """The last value; of a rotation the mean, because it goes to 0 with the learning rate."""
    if name not in metrics:
        return NONE
    values = list(metrics[name].values())
    value = np.mean(values) if name.startswith("rotation/") else values[-1]
    return minus(f"{value:.4g}")
