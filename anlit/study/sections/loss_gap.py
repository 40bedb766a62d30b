"""The section `loss_gap`: losses of arms minus a baseline's, seed by seed, over a common `vary`."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from anlit.compare import statistics
from anlit.compare.notes import obstacle_to_comparison
from anlit.compare.statistics import (
    SpeedUp,
    Summary,
    differences,
    mean_difference,
    mean_sd,
    speed_up,
)
from anlit.reporting.figure import (
    BASELINE_LINE,
    COLUMN_WIDTH,
    INK,
    LineStyle,
    legend_below,
    line_styles,
    save,
    style,
)
from anlit.reporting.table import NONE, markdown_table
from anlit.reporting.text import short_number
from anlit.study.results import MeasuredArm, StudyResults
from anlit.study.sections.axes import UNITS, display_name, distinct_values

MAX_COLUMNS = 3
"""Panels in a row."""


class Gap(NamedTuple):
    """An arm against the baseline at a point of `vary`."""

    panel: str
    title: str
    x: float
    speedup: SpeedUp
    arm_losses: statistics.Losses
    """Final losses by seed, of the seeds that both have."""
    baseline_losses: statistics.Losses
    obstacle: str = ""
    """Why the losses cannot be compared, in two words. "" if they can."""

    @property
    def differences(self) -> list[float]:
        """The differences of the seeds on which neither run is lost."""
        all_differences = differences(self.arm_losses, self.baseline_losses)
        return [difference for difference in all_differences if difference is not None]

    @property
    def seeds(self) -> str:
        """`3`, or `2 of 3` if a run is lost."""
        n_known = len(self.differences)
        n_seeds = len(self.arm_losses)
        return str(n_known) if n_known == n_seeds else f"{n_known} of {n_seeds}"

    @property
    def mean(self) -> float:
        """The mean difference. NaN if a run is lost."""
        if len(self.differences) < len(self.arm_losses):
            return np.nan
        return float(np.mean(self.differences))


def loss_gap(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """A figure and a table of the gaps.

    Options: `baseline`, an arm; `each`, a name of `vary` with a panel for each value; `over`
    (default: tokens_per_parameter).
    """
    panel_key = options["each"]
    over = str(options.get("over", "tokens_per_parameter"))
    gaps = _gaps(results, options["baseline"], panel_key, over)
    baseline = results.study.title_of(options["baseline"])
    title = f"## Loss minus {baseline}'s"
    if not gaps:
        return [title, "No pair of runs has finished yet."]
    path = results.output / f"loss_gap-{over}.png"
    comparable = [gap for gap in gaps if not gap.obstacle]
    picture = ""
    if comparable:
        draw_gaps(comparable, baseline, panel_key, over, path)
        picture = f"![loss minus the baseline's over {display_name(over)}]({path.name})"
    head = [
        panel_key,
        display_name(over),
        "arm",
        "seeds",
        "baseline's loss",
        "minus the baseline's (95 %)",
        "speed-up, tokens",
    ]
    return [
        title,
        picture,
        "Final validation losses in nats per token, same seeds; below zero the arm is ahead. "
        "Intervals of two or three seeds are wide.",
        markdown_table(head, list(map(_row, gaps)), left=(0, 2)),
    ]


def _row(gap: Gap) -> list[str]:
    difference = NONE
    if not gap.obstacle:
        difference = mean_difference(gap.arm_losses, gap.baseline_losses, "+.4f")
    return [
        gap.panel,
        short_number(gap.x),
        gap.title,
        gap.seeds,
        mean_sd(Summary([*gap.baseline_losses.values()]), 4),
        difference,
        gap.speedup.words,
    ]


def _gaps(results: StudyResults, baseline: str, panel_key: str, over: str) -> list[Gap]:
    """The gaps of all arms at all points of `vary`, in order of the panels and of x.

    Both arms need a finished run on a common seed.
    """
    measured_arms = results.measured_arms()
    baselines = {}
    for measured in measured_arms:
        if measured.arm.base == baseline:
            baselines[measured.arm.varied.name] = measured
    gaps = []
    for measured in measured_arms:
        measured_baseline = baselines.get(measured.arm.varied.name)
        if measured.arm.base != baseline and measured_baseline is not None:
            gap = _gap(results, measured, measured_baseline, panel_key, over)
            if gap is not None:
                gaps.append(gap)
    panels = list(dict.fromkeys(gap.panel for gap in gaps))
    return sorted(gaps, key=lambda gap: (panels.index(gap.panel), gap.x))


def _gap(
    results: StudyResults,
    measured: MeasuredArm,
    baseline: MeasuredArm,
    panel_key: str,
    over: str,
) -> Gap | None:
    """The gap at a point of `vary`. None without a finished run of both on a common seed."""
    group = results.group(measured.arm)
    baseline_group = results.group(baseline.arm)
    if not (measured.losses and baseline.losses and group and baseline_group):
        return None
    losses = group.loss_by_seed()
    baseline_losses = baseline_group.loss_by_seed()
    common_seeds = [seed for seed in losses if seed in baseline_losses]
    if not common_seeds:
        return None
    obstacle = obstacle_to_comparison(group, baseline_group)
    speedup = SpeedUp((), obstacle=obstacle)
    if not obstacle:
        speedup = speed_up(baseline_group.seeded_curves(), group.seeded_curves())
    return Gap(
        panel=str(measured.arm.varied.shown[panel_key]),
        title=results.study.title_of(measured.arm.base),
        x=baseline.number(over),
        speedup=speedup,
        arm_losses={seed: losses[seed] for seed in common_seeds},
        baseline_losses={seed: baseline_losses[seed] for seed in common_seeds},
        obstacle=obstacle,
    )


def draw_gaps(gaps: list[Gap], baseline: str, panel_key: str, over: str, path: Path) -> None:
    """Draw a panel for each value of `panel_key`: dots for seeds, lines through their means."""
    panels = list(dict.fromkeys(gap.panel for gap in gaps))
    styles = line_styles(list(dict.fromkeys(gap.title for gap in gaps)))
    n_columns = min(MAX_COLUMNS, len(panels))
    n_rows = -(-len(panels) // MAX_COLUMNS)
    with style(8):
        size = (COLUMN_WIDTH, 0.9 + 1.6 * n_rows)
        figure, grid = plt.subplots(n_rows, n_columns, figsize=size, sharey=True, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for axes, panel in zip(grid.flat, panels, strict=False):
            gaps_of_panel = [gap for gap in gaps if gap.panel == panel]
            _draw_panel(axes, gaps_of_panel, styles)
            axes.set_title(f"{display_name(panel_key)} {panel}")
        grid[-1, n_columns // 2].set_xlabel(UNITS.get(over, display_name(over)))
        figure.supylabel(f"loss minus {baseline}'s (nats per token)", fontsize=8)
        handles = []
        for title, (colour, marker, dash) in styles.items():
            line: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dash}
            handles.append(Line2D([], [], markersize=4, label=title, **line))
        legend_title = "dots: seeds; lines: their means"
        legend_below(figure, handles, columns=3, title=legend_title)
        save(figure, path)


def _draw_panel(axes: Axes, gaps: list[Gap], styles: dict[str, LineStyle]) -> None:
    axes.axhline(0, color=INK, linestyle=BASELINE_LINE, linewidth=0.8)
    for title, (colour, marker, dash) in styles.items():
        gaps_of_arm = [gap for gap in gaps if gap.title == title]
        xs = [gap.x for gap in gaps_of_arm]
        for gap in gaps_of_arm:
            x_of_seeds = [gap.x] * len(gap.differences)
            dots: dict[str, Any] = {"color": colour, "markersize": 3, "alpha": 0.6}
            axes.plot(x_of_seeds, gap.differences, marker, linestyle="none", **dots)
        means = [gap.mean for gap in gaps_of_arm]
        axes.plot(xs, means, linestyle=dash, color=colour, linewidth=1.2)
    ticks = distinct_values([gap.x for gap in gaps])
    is_small = max(ticks) < 100
    format_tick = "{:.2g}".format if is_small else short_number
    labels = list(map(format_tick, ticks))
    if ticks[0] > 0:
        axes.set_xscale("log")
        axes.set_xlim(ticks[0] / 1.6, ticks[-1] * 1.6)
    axes.set_xticks(ticks, labels)
    axes.minorticks_off()
    axes.tick_params(labelsize=7)
    axes.grid()
