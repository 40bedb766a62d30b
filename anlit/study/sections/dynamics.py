"""The section `dynamics`: the loss, and norms, steps and rotations of `TrainingDynamics`, over training."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anlit.io.read import number, read_rows
from anlit.reporting.figure import TEXT, line_styles, panels, save, style
from anlit.reporting.table import NONE, markdown_table
from anlit.runs.folders import METRICS, Run
from anlit.study.results import StudyResults

Series = dict[str, dict[float, float]]
"""Metric → value after each step that logged it."""
LAST = "last"
INDUCTION_GAIN = "induction_gain"
"""`copying/first` minus `copying/second`."""
PANELS = {
    "val/loss": "validation loss (nats per token)",
    INDUCTION_GAIN: "nats that a copy of random tokens saves",
    f"hidden/{LAST}/norm": "‖h‖ after the last block",
    f"hidden/{LAST}/norm_spread": "its spread over tokens (sd / mean)",
    f"hidden/{LAST}/step": "the last block's step ‖h′ − h‖ / ‖h‖",
    "norms/share_at_bound": "share of rows at their bound",
    "rotation/W_q": "rotation of W_q's rows per step (radians)",
    "rotation/W_d": "rotation of W_d's rows per step (radians)",
    "rotation/head": "rotation of the head's rows per step (radians)",
}
"""Metric → axis. `last` stands for the deepest layer that a run logged."""
MARKS, WRAPPED = 6, 34
"""Markers on a line, and characters in a line of a panel's title."""


def dynamics(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """A panel for each quantity over the steps, a table of the last values: means over finished seeds that log it."""
    seeds: dict[str, list[Series]] = {}
    counts: list[str] = []
    for arm in results.study.arms:
        all_seeds = [series(run) for run in results.measured(arm) if run.complete]
        logged = [
            metrics for metrics in all_seeds if len(metrics) > 1
        ]  # one restored from a record has losses alone
        if logged and arm.is_among(options.get("arms")):
            seeds[arm.title] = logged
            counts.append(f"{len(logged)} of {len(all_seeds)}")
    if not seeds:
        return [
            "## Training dynamics",
            "No finished run logged them: add `trainer/dynamics.yaml` to the study.",
        ]
    means = {title: mean_over_seeds(logged) for title, logged in seeds.items()}
    shown = [name for name in PANELS if any(name in metrics for metrics in means.values())]
    _draw(shown, means, seeds, results.output / "dynamics.png")
    rows = [["seeds that logged them", *counts]]
    rows += [
        [PANELS[name], *(_cell(name, metrics) for metrics in means.values())] for name in shown
    ]
    return [
        "## Training dynamics",
        "Thin lines are seeds, thick ones and the table their means. A rotation is the mean angle by which one "
        "optimizer step turned a row. What a copy saves is the loss per token on random tokens minus that on the same "
        "tokens once more.",
        "![training dynamics](dynamics.png)",
        markdown_table(["at the end of training; rotations: mean over training", *means], rows),
    ]


def series(run: Run) -> Series:
    """The panels' metrics of one run; those that it did not log are left out."""
    path = run.folder / METRICS
    rows = read_rows(path) if path.exists() else []
    deepest = max(
        (name.split("/")[1] for name in (rows[0] if rows else ()) if name.startswith("hidden/")),
        default=LAST,
    )
    metrics: Series = {}
    for name in PANELS:
        columns = (
            ["copying/first", "copying/second"]
            if name == INDUCTION_GAIN
            else [name.replace(LAST, deepest)]
        )
        for row in (row for row in rows if row.get(columns[-1])):
            value, *minus = (number(row, column, path) for column in columns)
            metrics.setdefault(name, {})[number(row, "step", path) + 1] = value - sum(minus)
    return metrics


def mean_over_seeds(seeds: Sequence[Series]) -> Series:
    """The mean of each metric at the steps that all seeds have."""
    means: Series = {}
    for name in PANELS:
        if each := [metrics[name] for metrics in seeds if name in metrics]:
            steps = sorted(set.intersection(*map(set, each)))
            means[name] = {
                step: float(np.mean([values[step] for values in each])) for step in steps
            }
    return means


def _draw(
    names: list[str], means: dict[str, Series], seeds: dict[str, list[Series]], path: Path
) -> None:
    """Write a panel for each metric in `names`: each arm's mean over its seeds, and thinner its seeds."""
    styles = line_styles(list(means))
    with style(8):
        figure, axes = panels(len(names), 3, TEXT / 3, 1.9)
        for ax, name in zip(axes, names, strict=True):
            for title, mean in (
                (title, metrics[name]) for title, metrics in means.items() if name in metrics
            ):
                look: dict[str, Any] = {
                    "linestyle": styles[title].dash,
                    "color": styles[title].colour,
                }
                for seed in (
                    seed[name] for seed in seeds[title] if name in seed and len(seeds[title]) > 1
                ):
                    ax.plot(*zip(*seed.items(), strict=True), linewidth=0.4, alpha=0.5, **look)
                ax.plot(*zip(*mean.items(), strict=True), label=title, linewidth=1.2, marker=styles[title].marker,
                        markersize=3, markevery=max(1, len(mean) // MARKS), **look)  # fmt: skip
            ax.set(title="\n".join(textwrap.wrap(PANELS[name], WRAPPED)), xlabel="step")
            ax.locator_params(axis="x", nbins=4)
            if name.startswith("rotation/") or name.endswith("/norm"):
                ax.set_yscale("log")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        save(figure, path)


def _cell(name: str, metrics: Series) -> str:
    """The last value; of a rotation the mean, because it ends with the learning rate."""
    if name not in metrics:
        return NONE
    values = list(metrics[name].values())
    return f"{np.mean(values) if name.startswith('rotation/') else values[-1]:.4g}"
