"""The section `annealed`: the speed-up between annealed runs at each length, and its trend."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from anlit.compare.statistics import (
    MEANING_OF_SD,
    Losses,
    Summary,
    difference,
    mean_difference,
    mean_sd,
)
from anlit.reporting.figure import (
    BASELINE_LINE,
    INK,
    TEXT_WIDTH,
    LineStyle,
    legend_below,
    line_styles,
    save,
    style,
)
from anlit.reporting.table import NONE, Table, markdown_table
from anlit.reporting.text import literal, short_number
from anlit.study.annealed_results import (
    AnnealedArm,
    AnnealedComparison,
    ArmComparison,
    LengthComparison,
    annealed_comparisons,
)
from anlit.study.results import StudyResults
from anlit.study.sections.axes import set_ticks

HEAD = (
    "arm",
    "tokens",
    "per parameter",
    "annealed loss",
    "baseline's",
    "minus the baseline's (95 %)",
    "speed-up, annealed",
    "speed-up, crossing",
)

CONSOLE_HEAD = {
    0: "arm",
    1: "tokens",
    5: "loss minus the\nbaseline's",
    6: "speed-up,\nannealed",
    7: "speed-up,\ncrossing",
}
"""Columns of `HEAD` for which a terminal of 80 characters has room, and their headings there."""
CUT = 1.5
"""Factor from the values of the picture at which intervals are cut off."""
INTERVAL_DISTANCE = 1.04
"""Factor of tokens between the intervals of two arms at the same length."""


def annealed(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """Pictures and tables of the speed-ups between annealed runs. It has no options."""
    paragraphs: list[str] = []
    for number, comparison in enumerate(annealed_comparisons(results), 1):
        paragraphs.append(f"## Annealed: {comparison.planned.title}")
        if not comparison.lines:
            paragraphs.append("No pair of annealed runs has finished yet.")
            continue
        if number == 1:
            paragraphs.append(_explanation(results))
        if _tokens_of(comparison):
            path = results.output / f"{number}-annealed.png"
            draw(comparison, path)
            paragraphs.append(f"![annealed losses, and speed-ups over tokens]({path.name})")
        paragraphs += [
            markdown_table(HEAD, list(_rows(comparison)), left=(0,)),
            "\n".join([*map(_trend_in_words, comparison.lines), *_lost_runs(comparison)]),
        ]
    return paragraphs


def summary_tables(results: StudyResults) -> Iterator[Table]:
    """A table for the console of each comparison that has a pair of annealed runs."""
    for comparison in annealed_comparisons(results):
        rows = []
        for row in _rows(comparison):
            rows.append([row[column].replace(" (", "\n(") for column in CONSOLE_HEAD])
        if rows:
            title = f"{results.study.title}: {comparison.planned.title}"
            yield Table(title, list(CONSOLE_HEAD.values()), rows)


def _explanation(results: StudyResults) -> str:
    annealing = results.study.annealing
    assert annealing is not None
    return (
        f"Each seed has one stable run. At each length the rate falls to 0 over the last "
        f"{annealing.decay:.0%} of the steps. **Speed-up, annealed:** tokens that the baseline "
        "needs for the arm's annealed loss, over the arm's tokens. The baseline's annealed losses "
        "of a seed are joined by lines in the logarithms of tokens and loss. They lie above a "
        "convex curve, so a speed-up is a little too large. Nothing is "
        "extrapolated: > and < are bounds, where the loss is beyond the baseline's longest or "
        "shortest run. An arm that leads has a bound at the greatest length. There the difference "
        "of the losses, paired by seed, tells whether it leads. **Speed-up, crossing:** the same "
        "runs by the definition of other sections, where the arm's curve first has the baseline's "
        "final loss. Curves are steep where the rate falls, so a crossing there is nearer to 1. "
        "Both are geometric means over pairs of seeds, with 95 % t-intervals of the logarithm. "
        "Intervals are not corrected for the number of arms and lengths. An arm has one rate, and "
        f"one warm-up in steps, at all lengths. {MEANING_OF_SD}"
    )


def _rows(comparison: AnnealedComparison) -> Iterator[list[str]]:
    """The cells of `HEAD` for each arm and length."""
    for line in comparison.lines:
        for point in line.points:
            tokens = NONE
            per_parameter = NONE
            if math.isfinite(point.tokens):
                tokens = short_number(point.tokens)
                if line.arm.parameters:
                    per_parameter = f"{point.tokens / line.arm.parameters:.3g}"
            yield [
                literal(line.arm.title),
                tokens,
                per_parameter,
                _mean_loss(point.losses),
                _mean_loss(point.baseline_losses),
                _difference(point),
                point.annealed.words,
                point.crossing.words,
            ]


def _mean_loss(losses: Losses) -> str:
    return mean_sd(Summary([*losses.values()]), 4)


def _difference(point: LengthComparison) -> str:
    """The arm's annealed losses minus the baseline's, with the interval of a paired t-test."""
    if point.annealed.obstacle:
        return NONE
    return mean_difference(point.losses, point.baseline_losses, "+.4f")


def _trend_in_words(line: ArmComparison) -> str:
    """A line of Markdown: the change with the length, and the lead at the greatest lengths."""
    exact = [point for point in line.points if point.annealed.is_exact]
    text = f"- {literal(line.arm.title)}: "
    if line.trend is None:
        text += "fewer than two lengths have a value on every seed, which shows no trend."
    else:
        text += (
            f"× {line.trend.per_doubling} for twice the tokens, over {line.trend.lengths} "
            f"lengths: {line.trend.words}."
        )
    if exact:
        last = exact[-1]
        text += f" At {short_number(last.tokens)} tokens {last.annealed.words}: {_lead(last)}."
    longest = line.points[-1]
    if longest.annealed.bounds:
        text += (
            f" At {short_number(longest.tokens)} tokens {longest.annealed.words}: its loss minus "
            f"the baseline's is {_difference(longest)}."
        )
    return text


def _lost_runs(comparison: AnnealedComparison) -> list[str]:
    """A line of Markdown on the runs without an annealed loss. [] if there are none."""
    lost = list(comparison.baseline.lost)
    for line in comparison.lines:
        lost += line.arm.lost
    if not lost:
        return []
    return [f"- LOST {literal(', '.join(lost))}: a lost run counts as a seed without a value."]


def _lead(point: LengthComparison) -> str:
    """Whether the interval at a length is above or below 1."""
    test = point.annealed.speedup.test
    if test is None:
        return "without an interval"
    if test.low > 1:
        return "ahead"
    return "behind" if test.high < 1 else "no lead is shown"


def raw_numbers(results: StudyResults) -> list[dict[str, Any]]:
    """The numbers of the section for report.json."""
    raw = []
    for comparison in annealed_comparisons(results):
        for line in comparison.lines:
            points = []
            for point in line.points:
                points.append({
                    "max_steps": point.length,
                    "tokens": point.tokens,
                    "losses": list(point.losses.values()),
                    "baseline_losses": list(point.baseline_losses.values()),
                    "loss_difference": difference(point.losses, point.baseline_losses),
                    "speedup_annealed": list(point.annealed.ratios.values()),
                    "bounds": sorted(point.annealed.bounds),
                    "test": point.annealed.speedup.test,
                    "speedup_crossing": point.crossing.values,
                })  # fmt: skip
            raw.append({
                "comparison": comparison.planned.title,
                "baseline": comparison.baseline.title,
                "arm": line.arm.title,
                "points": points,
                "per_doubling": line.trend.per_doubling if line.trend else None,
            })  # fmt: skip
    return raw


def draw(comparison: AnnealedComparison, path: Path) -> None:
    """Draw annealed losses over tokens, and both speed-ups with the annealed one's intervals."""
    arms = [comparison.baseline, *(line.arm for line in comparison.lines)]
    styles = line_styles([arm.title for arm in arms])
    with style():
        figure, (losses, speedups) = plt.subplots(1, 2, figsize=(TEXT_WIDTH, 3.1))
        for arm in arms:
            _draw_losses(losses, arm, styles[arm.title])
        middle = (len(comparison.lines) - 1) / 2
        for number, line in enumerate(comparison.lines):
            shift = INTERVAL_DISTANCE ** (number - middle)
            _draw_speedups(speedups, line, styles[line.arm.title], shift)
        speedups.axhline(1, color=INK, linestyle=BASELINE_LINE, linewidth=0.8, zorder=1)
        losses.set(title="annealed losses", ylabel="validation loss (nats per token)")
        speedups.set(title="speed-up in tokens over the baseline")
        speedups.set_ylim(*_limits(comparison, speedups.get_ylim()))
        tokens = _tokens_of(comparison)
        for axes in (losses, speedups):
            axes.set_xscale("log")
            set_ticks(axes.xaxis, tokens)
            axes.set_xlabel("training tokens")
            axes.grid()
        legend_title = (
            "left: means over seeds; right: solid with 95 % intervals, annealed;\n"
            "hollow triangles, its bounds; dotted, crossing"
        )
        handles, _ = losses.get_legend_handles_labels()
        legend_below(figure, handles, columns=2, title=legend_title)
        save(figure, path)


def _limits(comparison: AnnealedComparison, limits: tuple[float, float]) -> tuple[float, float]:
    """`limits` of the speed-ups' axis, at most `CUT` times the values.

    So an interval of few seeds does not flatten the others.
    """
    values = [1.0]
    for line in comparison.lines:
        for point in line.points:
            values += filter(None, (point.annealed.speedup.mean, point.crossing.mean))
    low, high = limits
    return max(low, min(values) / CUT), min(high, CUT * max(values))


def _tokens_of(comparison: AnnealedComparison) -> list[float]:
    """The training tokens of all points that have any."""
    tokens = []
    for line in comparison.lines:
        tokens += [point.tokens for point in line.points if math.isfinite(point.tokens)]
    return tokens


def _draw_losses(axes: Axes, arm: AnnealedArm, look: LineStyle) -> None:
    tokens = []
    means = []
    for length in arm.lengths:
        tokens.append(arm.tokens(length))
        means.append(Summary([*arm.losses(length).values()]).mean or np.nan)
    axes.plot(tokens, means, look.marker, color=look.colour, linestyle=look.dash, markersize=4,
              linewidth=1.2, label=arm.title)  # fmt: skip


def _draw_speedups(axes: Axes, line: ArmComparison, look: LineStyle, shift: float) -> None:
    """Draw exact speed-ups as a line with intervals, bounds hollow, crossings dotted.

    Tokens are multiplied by `shift`, so that intervals of several arms stand side by side.
    """
    colour: dict[str, Any] = {"color": look.colour}
    exact = []
    for point in line.points:
        annealed = point.annealed
        mean = annealed.speedup.mean or np.nan
        test = annealed.speedup.test
        if annealed.is_exact:
            below = mean - test.low if test else np.nan
            above = test.high - mean if test else np.nan
            exact.append((shift * point.tokens, mean, below, above))
        elif len(annealed.bounds) == 1:
            marker = "^" if ">" in annealed.bounds else "v"
            axes.plot(shift * point.tokens, mean, marker, fillstyle="none", **colour)
    tokens, means, *bars = np.reshape(exact, (-1, 4)).T
    axes.errorbar(tokens, means, bars, fmt=look.marker, markersize=4, linestyle="-",
                  linewidth=1.2, capsize=2, elinewidth=0.8, **colour)  # fmt: skip
    all_tokens = [shift * point.tokens for point in line.points]
    crossings = [point.crossing.mean or np.nan for point in line.points]
    axes.plot(all_tokens, crossings, look.marker, markersize=2.5, linestyle=":", linewidth=1,
              **colour)  # fmt: skip
