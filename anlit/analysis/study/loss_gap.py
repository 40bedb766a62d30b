"""The section `loss_gap`: how far every arm is ahead of the baseline, at each point of their common `vary`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

from anlit.analysis.comparison import loss_by_seed, results_against
from anlit.analysis.significance import Test, difference
from anlit.analysis.speedup import SpeedUp
from anlit.analysis.study.plots import apart, axis_label, named
from anlit.analysis.study.results import StudyResults
from anlit.errors import UserError
from anlit.reporting.figure import BASELINE_LINE, COLUMN, INK, line_styles, save, style
from anlit.reporting.intervals import Summary, mean_sd
from anlit.reporting.table import markdown_table
from anlit.reporting.text import minus, short_number

COLUMNS = 3
"""Panels in a row."""


@dataclass(frozen=True, eq=False)
class GapPoint:
    """An arm against the baseline at one point of `vary`.

    Args:
        panel: The panel's value of `each`.
        title: The arm's title.
        x: The value of `over`, of the baseline's runs.
        speedup: The arm's speed-up over the baseline.
        theirs: Final losses of the baseline on the seeds that both have; nats per token.
        differences: The arm's minus the baseline's on these seeds.
        test: Of the differences; None without two seeds.
    """

    panel: str
    title: str
    x: float
    speedup: SpeedUp
    theirs: Summary
    differences: tuple[float, ...]
    test: Test | None

    @property
    def mean(self) -> float:
        """Of the differences."""
        return sum(self.differences) / len(self.differences)


def loss_gap(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """Options: `baseline`, an arm; `each`, a name of `vary` with a panel for each of its values; `over` (default:
    tokens_per_parameter).

    Raises:
        UserError: The baseline is no arm, or `each` is no name of `vary`.
    """
    over = str(options.get("over", "tokens_per_parameter"))
    found = cells(results, options["baseline"], options["each"], over)
    baseline = results.study.title_of(options["baseline"])
    title = f"## Lead over {baseline}"
    if not found:
        return [title, "No pair of runs has finished yet."]
    path = results.output / f"loss_gap-{over}.png"
    draw(found, baseline, over, path)
    rows = [
        [one.panel, short_number(one.x), one.title, str(len(one.differences)), mean_sd(one.theirs, 4), _tested(one),
         one.speedup.words]
        for one in found
    ]  # fmt: skip
    columns = ("arm", "seeds", "baseline's loss", "minus the baseline's (95 %)", "speed-up, tokens")
    head = [options["each"], named(over), *columns]
    return [
        title,
        f"![loss minus the baseline's over {named(over)}]({path.name})",
        "Final validation losses in nats per token, same seeds; below zero the arm is ahead. Intervals of two or three "
        "seeds are wide.",
        markdown_table(head, rows, left=(0, 2)),
    ]


def cells(results: StudyResults, baseline: str, each: str, over: str) -> list[GapPoint]:
    """Every arm but the baseline at every point of `vary` at which both have a finished run."""
    if baseline not in results.study.content["arms"]:
        raise UserError(
            f"the section 'loss_gap' of {results.study.path} has the baseline '{baseline}', which is no arm"
        )
    points = {(point.arm.base, point.arm.varied.name): point for point in results.points()}
    found = []
    for (base, place), point in points.items():
        if each not in point.arm.varied.shown:
            known = ", ".join(point.arm.varied.shown) or "none"
            raise UserError(
                f"the section 'loss_gap' of {results.study.path} asks for each '{each}': choose one of {known}"
            )
        against = points.get((baseline, place))
        if base == baseline or against is None or not (point.losses and against.losses):
            continue
        ours, theirs = results.group(point.arm), results.group(against.arm)
        if ours is None or theirs is None:
            continue
        losses, baselines = loss_by_seed(ours), loss_by_seed(theirs)
        mine = {seed: loss for seed, loss in losses.items() if seed in baselines}
        other = {seed: baselines[seed] for seed in mine}
        if not mine:
            continue
        found.append(
            GapPoint(
                panel=str(point.arm.varied.shown[each]),
                title=results.study.title_of(base),
                x=against.number(over),
                speedup=results_against([theirs, ours], theirs)[1].speedup,
                theirs=Summary(tuple(other.values())),
                differences=tuple(mine[seed] - other[seed] for seed in mine),
                test=difference(mine, other),
            )
        )
    panels = list(dict.fromkeys(one.panel for one in found))
    return sorted(found, key=lambda one: (panels.index(one.panel), one.x))


def draw(found: list[GapPoint], baseline: str, over: str, path: Path) -> None:
    """Writes a panel for each value of `each`: a dot for each seed, a line through their means."""
    names = list(dict.fromkeys(one.panel for one in found))
    titles = list(dict.fromkeys(one.title for one in found))
    drawn = line_styles(titles)
    n_rows = -(-len(names) // COLUMNS)
    with style(8):
        figure, grid = plt.subplots(n_rows, min(COLUMNS, len(names)), figsize=(COLUMN, 0.9 + 1.6 * n_rows),
                                    sharey=True, squeeze=False)  # fmt: skip
        for ax in grid.flat[len(names) :]:
            ax.set_axis_off()
        for ax, name in zip(grid.flat, names, strict=False):
            ax.axhline(0, color=INK, linestyle=BASELINE_LINE, linewidth=0.8)
            for title in titles:
                line = sorted((one for one in found if (one.panel, one.title) == (name, title)), key=lambda one: one.x)
                colour, marker, dash = drawn[title]
                for one in line:
                    ax.plot([one.x] * len(one.differences), one.differences, marker, color=colour, markersize=3,
                            alpha=0.6, linestyle="none")  # fmt: skip
                ax.plot(
                    [one.x for one in line], [one.mean for one in line], linestyle=dash, color=colour, linewidth=1.2
                )
            ax.set_xscale("log")
            ticks = apart([one.x for one in found if one.panel == name])
            ax.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks] if max(ticks) < 100 else map(short_number, ticks))
            ax.minorticks_off()
            ax.tick_params(labelsize=7)
            ax.set_xlim(ticks[0] / 1.6, ticks[-1] * 1.6)
            ax.set_title(name)
            ax.grid()
        grid[-1, grid.shape[1] // 2].set_xlabel(axis_label(over))
        figure.supylabel(f"loss minus {baseline}'s (nats per token)", fontsize=8)
        legend = [Line2D([], [], color=look.colour, marker=look.marker, linestyle=look.dash, markersize=4, label=title)
                  for title, look in drawn.items()]  # fmt: skip
        figure.legend(handles=legend, loc="outside lower center", ncols=3, title="dots: seeds; lines: their means")
        save(figure, path)


def _tested(one: GapPoint) -> str:
    shown = f"{one.mean:+.4f}"
    if one.test is not None:
        shown += f" ({one.test.low:+.4f} … {one.test.high:+.4f})"
    return minus(shown)
