"""The sections `loss_gap` and `onset`: arms minus a baseline, seed by seed.

`loss_gap` has the losses at each point of a common `vary`. `onset` is about a skill such as copying, which a level of
the loss needs: the tokens until each run is there, and the loss a fixed number of tokens later.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

from anlit.compare import statistics
from anlit.compare.statistics import (
    SpeedUp,
    Summary,
    differences,
    mean_difference,
    mean_sd,
    speed_up,
    tokens_to_loss,
)
from anlit.errors import UserError
from anlit.reporting.figure import BASELINE_LINE, COLUMN, INK, line_styles, save, style
from anlit.reporting.table import NONE, markdown_table
from anlit.reporting.text import literal, short_number
from anlit.study.results import StudyResults
from anlit.study.sections.trend import UNITS, apart, named

COLUMNS = 3  # panels in a row


class Gap(NamedTuple):
    """An arm against the baseline at one point of `vary`; final losses by seed, of the seeds that both have."""

    panel: str
    title: str
    x: float
    speedup: SpeedUp
    ours: statistics.Losses
    theirs: statistics.Losses

    @property
    def differences(self) -> list[float]:
        """One for each seed on which neither run is lost."""
        return [each for each in differences(self.ours, self.theirs) if each is not None]

    @property
    def seeds(self) -> str:
        """`3`, or `2 of 3` where a run is lost."""
        known = len(self.differences)
        return str(known) + f" of {len(self.ours)}" * (known < len(self.ours))

    @property
    def mean(self) -> float:
        """The mean difference; NaN where a run is lost."""
        return (
            float(np.mean(self.differences)) if len(self.differences) == len(self.ours) else np.nan
        )


def loss_gap(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """Options: `baseline`, an arm; `each`, a name of `vary` with a panel for each of its values; `over` (default:
    tokens_per_parameter). UserError if one is unknown.
    """
    over, each = str(options.get("over", "tokens_per_parameter")), options["each"]
    gaps = _gaps(results, options["baseline"], each, over)
    baseline = results.study.title_of(options["baseline"])
    title = f"## Loss minus {baseline}'s"
    if not gaps:
        return [title, "No pair of runs has finished yet."]
    path = results.output / f"loss_gap-{over}.png"
    draw(gaps, baseline, each, over, path)
    rows = [[gap.panel, short_number(gap.x), gap.title, gap.seeds,
             mean_sd(Summary([*gap.theirs.values()]), 4), mean_difference(gap.ours, gap.theirs, "+.4f"),
             gap.speedup.words] for gap in gaps]  # fmt: skip
    columns = ("arm", "seeds", "baseline's loss", "minus the baseline's (95 %)", "speed-up, tokens")
    return [
        title,
        f"![loss minus the baseline's over {named(over)}]({path.name})",
        "Final validation losses in nats per token, same seeds; below zero the arm is ahead. Intervals of two or three "
        "seeds are wide.",
        markdown_table([each, named(over), *columns], rows, left=(0, 2)),
    ]


def _gaps(results: StudyResults, baseline: str, each: str, over: str) -> list[Gap]:
    """Every arm but the baseline at every point of `vary` at which both have a finished run on a common seed."""
    points = {(point.arm.base, point.arm.varied.name): point for point in results.points()}
    gaps = []
    for (base, place), point in points.items():
        if each not in point.arm.varied.shown:
            known = ", ".join(point.arm.varied.shown) or "none"
            raise UserError(f"the section 'loss_gap' asks for each '{each}': choose one of {known}")
        against = points.get((baseline, place))
        if base == baseline or against is None or not (point.losses and against.losses):
            continue
        arm, other = results.group(point.arm), results.group(against.arm)
        ours, theirs = (group.loss_by_seed() if group else {} for group in (arm, other))
        if arm and other and (common := [seed for seed in ours if seed in theirs]):
            speedup = speed_up(other.seeded_curves(), arm.seeded_curves())
            panel, title = str(point.arm.varied.shown[each]), results.study.title_of(base)
            paired = ({seed: own[seed] for seed in common} for own in (ours, theirs))
            gaps.append(Gap(panel, title, against.number(over), speedup, *paired))
    panels = list(dict.fromkeys(gap.panel for gap in gaps))
    return sorted(gaps, key=lambda gap: (panels.index(gap.panel), gap.x))


def draw(gaps: list[Gap], baseline: str, each: str, over: str, path: Path) -> None:
    """Writes a panel for each value of `each`: a dot for each seed, a line through their means."""
    panels = list(dict.fromkeys(gap.panel for gap in gaps))
    styles = line_styles(list(dict.fromkeys(gap.title for gap in gaps)))
    n_rows = -(-len(panels) // COLUMNS)
    with style(8):
        figure, grid = plt.subplots(n_rows, min(COLUMNS, len(panels)), figsize=(COLUMN, 0.9 + 1.6 * n_rows),
                                    sharey=True, squeeze=False)  # fmt: skip
        for ax in grid.flat[len(panels) :]:
            ax.set_axis_off()
        for ax, panel in zip(grid.flat, panels, strict=False):
            ax.axhline(0, color=INK, linestyle=BASELINE_LINE, linewidth=0.8)
            for title, (colour, marker, dash) in styles.items():
                line = [gap for gap in gaps if (gap.panel, gap.title) == (panel, title)]
                seeds = [(gap.x, each_seed) for gap in line for each_seed in gap.differences]
                ax.plot(
                    *np.array(seeds).reshape(-1, 2).T,
                    marker,
                    color=colour,
                    markersize=3,
                    alpha=0.6,
                    ls="none",
                )
                ax.plot([gap.x for gap in line], [gap.mean for gap in line], linestyle=dash,
                        color=colour, linewidth=1.2)  # fmt: skip
            ticks = apart([gap.x for gap in gaps if gap.panel == panel])
            ax.set_xscale("log")
            ax.set_xticks(
                ticks, [f"{tick:.2g}" if max(ticks) < 100 else short_number(tick) for tick in ticks]
            )
            ax.minorticks_off()
            ax.tick_params(labelsize=7)
            ax.set(xlim=(ticks[0] / 1.6, ticks[-1] * 1.6), title=f"{named(each)} {panel}")
            ax.grid()
        grid[-1, grid.shape[1] // 2].set_xlabel(UNITS.get(over, named(over)))
        figure.supylabel(f"loss minus {baseline}'s (nats per token)", fontsize=8)
        legend = [Line2D([], [], color=look.colour, marker=look.marker, linestyle=look.dash, markersize=4, label=title)
                  for title, look in styles.items()]  # fmt: skip
        figure.legend(
            handles=legend,
            loc="outside lower center",
            ncols=3,
            title="dots: seeds; lines: their means",
        )
        save(figure, path)


def onset(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """Options: `loss`, the level in nats per token; `after`, a number of tokens; `baseline`, the name of an arm."""
    level, after, baseline = float(options["loss"]), float(options["after"]), options["baseline"]
    arms = {arm.name: arm for arm in results.study.arms}
    curves = {name: {run.seeds: run.curve.finite() if run.complete else None for run in results.measured(arm)
                     if run.complete or run.lost} for name, arm in arms.items()}  # fmt: skip
    millions: dict[str, dict[Any, float | None]] = {
        name: dict.fromkeys(seeds) for name, seeds in curves.items()
    }
    later: dict[str, dict[Any, float | None]] = {
        name: dict.fromkeys(seeds) for name, seeds in curves.items()
    }
    for name, seed, curve in (
        (name, *item) for name, seeds in curves.items() for item in seeds.items()
    ):
        if curve is not None and (tokens := tokens_to_loss(curve, level)) is not None:
            millions[name][seed] = tokens / 1e6
            if tokens + after <= curve.tokens[-1]:
                later[name][seed] = float(np.interp(tokens + after, curve.tokens, curve.loss))
    title, base, rows = "## Onset", literal(arms[baseline].title), []
    for name in filter(curves.get, arms):
        gaps = [NONE if name == baseline else mean_difference(own[name], own[baseline], ".3f")
                for own in (millions, later)]  # fmt: skip
        each = [
            NONE if onset is None else short_number(1e6 * onset)
            for onset in millions[name].values()
        ]
        loss = mean_sd(Summary([*later[name].values()]), 3)
        rows.append([literal(arms[name].title), ", ".join(each), gaps[0], loss, gaps[1]])
    if not rows:
        return [title, "No run has finished yet."]
    return [
        title,
        f"The onset is where a run's validation loss first is {level:g} nats per token, linear between points. The "
        f"loss after it is that of {short_number(after)} training tokens later; {NONE} where no run gets so far. "
        f"Differences are from {base}, over the seeds that both have, with 95 % intervals of a paired t-test.",
        markdown_table(
            ["arm", "onset of each seed, tokens", f"minus that of {base}, 10⁶ tokens",
             f"loss {short_number(after)} tokens after it", f"minus that of {base}"], rows, left=(0, 1)),
    ]  # fmt: skip
