"""The section `dynamics`: the loss, norms, steps and rotations over training.

The values are those of `anlit.training.callbacks.TrainingDynamics`.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anlit.analysis.study.results import StudyResults
from anlit.reading import number, read_rows
from anlit.reporting.figure import TEXT, line_styles, panels, save, style
from anlit.reporting.table import NONE, markdown_table
from anlit.runs.folders import METRICS, Run

Series = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Steps and values, each of shape (points,)."""

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
LOGARITHMIC = tuple(name for name in PANELS if name.startswith("rotation/") or name.endswith("/norm"))


def dynamics(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """A panel for each quantity over the steps, and a table of the last values, as means over the finished seeds."""
    names = options.get("arms")
    arms = {arm.title: results.measured(arm) for arm in results.study.arms if names is None or arm.base in names}
    found = {title: [series(run) for run in runs if run.complete] for title, runs in arms.items()}
    found = {title: seeds for title, seeds in found.items() if any(len(one) > 1 for one in seeds)}
    if not found:
        return ["## Training dynamics", "No finished run logged them: add `trainer/dynamics.yaml` to the study."]
    lines = {title: mean_over_seeds(seeds) for title, seeds in found.items()}
    draw(lines, found, results.output / "dynamics.png")
    shown = [name for name in PANELS if any(name in one for one in lines.values())]
    rows = [[PANELS[name], *(_cell(name, one.get(name)) for one in lines.values())] for name in shown]
    return [
        "## Training dynamics",
        "Thin lines are seeds, thick ones and the table their means. A rotation is the mean angle by which one "
        "optimizer step turned a row. What a copy saves is the loss per token on random tokens minus that on the same "
        "tokens once more.",
        "![training dynamics](dynamics.png)",
        markdown_table(["at the end of training; rotations: mean over training", *lines], rows),
    ]


def series(run: Run) -> dict[str, Series]:
    """The panels' metrics of one run by name; those that it did not log are left out."""
    path = run.folder / METRICS
    rows = read_rows(path) if path.exists() else []
    layers = sorted({name.split("/")[1] for name in (rows[0] if rows else ()) if name.startswith("hidden/")})
    columns = {name: name.replace(LAST, layers[-1]) if layers else name for name in PANELS}
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in PANELS}
    for row in rows:
        if row.get("copying/second"):
            row[INDUCTION_GAIN] = str(number(row, "copying/first", path) - number(row, "copying/second", path))
        for name, column in columns.items():
            if row.get(column):
                points[name].append((number(row, "step", path) + 1, number(row, column, path)))
    pairs = {name: np.array(values).T for name, values in points.items() if values}
    return {name: (steps, values) for name, (steps, values) in pairs.items()}


def mean_over_seeds(seeds: Sequence[dict[str, Series]]) -> dict[str, Series]:
    """The mean of each metric at the steps that all seeds have."""
    means: dict[str, Series] = {}
    for name in PANELS:
        each = [dict(zip(*map(np.ndarray.tolist, one[name]), strict=True)) for one in seeds if name in one]
        if each:
            steps = sorted(set.intersection(*(set(one) for one in each)))
            means[name] = np.array(steps), np.array([np.mean([one[step] for one in each]) for step in steps])
    return means


def draw(lines: dict[str, dict[str, Series]], seeds: dict[str, list[dict[str, Series]]], path: Path) -> None:
    """Write a panel for each metric that a line has: each arm's mean over its seeds, and thinner its seeds."""
    names = [name for name in PANELS if any(name in one for one in lines.values())]
    with style(8):
        figure, axes = panels(len(names), 3, TEXT / 3, 1.9)
        drawn = line_styles(list(lines))
        for ax, name in zip(axes, names, strict=True):
            for title, one in lines.items():
                look: dict[str, Any] = {"linestyle": drawn[title].dash, "color": drawn[title].colour}
                for seed in seeds[title] if len(seeds[title]) > 1 else ():
                    if name in seed:
                        ax.plot(*seed[name], linewidth=0.4, alpha=0.5, **look)
                if name in one:
                    every = max(1, len(one[name][0]) // MARKS)
                    ax.plot(*one[name], label=title, linewidth=1.2, marker=drawn[title].marker, markersize=3,
                            markevery=every, **look)  # fmt: skip
            ax.set_title("\n".join(textwrap.wrap(PANELS[name], WRAPPED)))
            ax.set_xlabel("step")
            ax.locator_params(axis="x", nbins=4)
            if name in LOGARITHMIC:
                ax.set_yscale("log")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        save(figure, path)


def _cell(name: str, found: Series | None) -> str:
    """The last value; of a rotation the mean, because it ends with the learning rate."""
    if found is None:
        return NONE
    return f"{found[1].mean() if name.startswith('rotation/') else found[1][-1]:.4g}"
