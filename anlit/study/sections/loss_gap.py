"""The section `loss_gap`: losses of arms minus a baseline's, seed by seed, over a common `vary`."""

from pathlib import Path
from typing import Any, NamedTuple

from anlit.compare import statistics
from anlit.compare.notes import obstacle_to_comparison
from anlit.compare.statistics import (
    MEANING_OF_SD,
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
    legend_below,
    line_styles,
    panels,
    save,
    style,
)
from anlit.reporting.table import NONE, markdown_table
from anlit.reporting.text import short_number
from anlit.study.results import MeasuredArm, StudyResults
from anlit.study.sections.axes import (
    BARS_TITLE,
    UNITS,
    Point,
    display_name,
    draw_lines,
    set_scale,
)

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
    def differences(self) -> Summary:
        """The differences of the seeds. None if a run is lost."""
        return Summary(differences(self.arm_losses, self.baseline_losses))

    @property
    def seeds(self) -> str:
        """`3`, or `2 of 3` if a run is lost."""
        n_seeds = len(self.arm_losses)
        n_lost = list(self.differences.values).count(None)
        return f"{n_seeds - n_lost} of {n_seeds}" if n_lost else str(n_seeds)


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
        f"Intervals of two or three seeds are wide. {MEANING_OF_SD}",
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
    names = list(dict.fromkeys(gap.panel for gap in gaps))
    return sorted(gaps, key=lambda gap: (names.index(gap.panel), gap.x))


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
    return Gap(
        panel=str(measured.arm.varied.shown[panel_key]),
        title=results.study.title_of(measured.arm.base),
        x=baseline.number(over),
        speedup=speed_up(baseline_group.seeded_curves(), group.seeded_curves(), obstacle),
        arm_losses={seed: losses[seed] for seed in common_seeds},
        baseline_losses={seed: baseline_losses[seed] for seed in common_seeds},
        obstacle=obstacle,
    )


def draw_gaps(gaps: list[Gap], baseline: str, panel_key: str, over: str, path: Path) -> None:
    """Draw a panel for each value of `panel_key`: means over seeds with a standard deviation."""
    lines_by_panel: dict[str, dict[str, list[Point]]] = {}
    for gap in gaps:
        lines = lines_by_panel.setdefault(gap.panel, {})
        lines.setdefault(gap.title, []).append((gap.x, gap.differences))
    styles = line_styles(list(dict.fromkeys(gap.title for gap in gaps)))
    n_columns = min(MAX_COLUMNS, len(lines_by_panel))
    handles: dict[str, Any] = {}
    with style():
        figure, all_axes = panels(len(lines_by_panel), n_columns, COLUMN_WIDTH / n_columns, 1.6)
        for axes in all_axes[1:]:
            axes.sharey(all_axes[0])
        for axes, (panel, lines) in zip(all_axes, lines_by_panel.items(), strict=True):
            draw_lines(axes, lines, styles)
            axes.axhline(0, color=INK, linestyle=BASELINE_LINE, linewidth=0.8)
            axes.set_title(f"{display_name(panel_key)} {panel}")
            set_scale(axes.xaxis, [gap.x for gap in gaps if gap.panel == panel])
            axes.tick_params(labelsize=7, labelleft=axes in all_axes[::n_columns])
            drawn_lines, labels = axes.get_legend_handles_labels()
            handles |= zip(labels, drawn_lines, strict=True)
        lowest_axes = all_axes[-n_columns:]
        lowest_axes[n_columns // 2].set_xlabel(UNITS.get(over, display_name(over)))
        figure.supylabel(f"loss minus {baseline}'s (nats per token)", fontsize=8)
        legend_below(figure, list(handles.values()), columns=3, title=BARS_TITLE)
        save(figure, path)
