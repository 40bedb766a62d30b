"""The section `trend`: loss, or the best value of a setting, over another value; and how settings are called."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axis import Axis
from matplotlib.ticker import NullLocator

from anlit.compare.statistics import Interval, Summary, mean_sd, power_law
from anlit.reporting.figure import COLUMN, DASHES, line_styles, save, style
from anlit.reporting.table import NONE, markdown_table
from anlit.reporting.text import short_number
from anlit.study.results import StudyResults

NAMES = {"tokens": "training tokens", "flops": "training compute", "lr": "learning rate", "batch_size": "batch size",
         "tau": "τ", "d_model": "width", "tokens_per_parameter": "tokens per parameter"}  # fmt: skip
"""Names of settings in headings and sentences; other settings have their name in the YAML."""
UNITS = {"flops": "training compute (6 N D, FLOPs)", "lr": "peak learning rate", "batch_size": "batch size (sequences)",
         "loss": "validation loss (nats per token)"}  # fmt: skip
BESIDE = 1 / 50
"""Lines with points at one x are moved apart by this share of the axis, so that none hides another."""
ALIKE = 1.1
"""Values nearer than this factor share a tick: arms of one width have slightly different parameters."""
ROOM = 1 / 8
"""The least distance of two ticks as a share of an axis. With less, the axis has decades."""
Series = Mapping[str, Sequence[tuple[float, Summary]]]
"""Label → points, x and the values of the seeds."""


def named(key: str) -> str:
    """A setting's name for readers."""
    return NAMES.get(key, key)


def trend(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """Options: `over`, and `value` (default: loss), names of settings or of what a `Point` has; `arms`."""
    value, over, arms = options.get("value", "loss"), options["over"], options.get("arms")
    series: dict[str, list[tuple[float, Summary]]] = {}
    for point in results.points():
        if point.losses and point.arm.is_among(arms):
            y = point.summary if value == "loss" else Summary([point.number(value)])
            series.setdefault(results.study.title_of(point.arm.base), []).append(
                (point.number(over), y)
            )
    title = f"## {'Loss' if value == 'loss' else f'Best {named(value)}'} over {named(over)}"
    if not series:
        return [title, "No run has finished yet."]
    laws = {label: law for label, line in series.items() if value != "loss"
            if (law := power_law([x for x, _ in line], [y.mean or 0.0 for _, y in line]))}  # fmt: skip
    path = results.output / f"trend-{value}-{over}.png"
    draw(series, over, value, path, laws)
    parts = [title, f"![{value} over {over}]({path.name})"]
    if value == "loss":
        rows = [[label, short_number(x), mean_sd(y, 4)] for label, line in series.items()
                for x, y in sorted(line, key=lambda point: (point[0], point[1].mean or math.inf))]  # fmt: skip
        return [*parts, markdown_table(["arm", named(over), "validation loss (nats/token)"], rows)]
    rows = [[label, str(len(series[label])), f"{b:.2f}", f"{low:.2f} … {high:.2f}" if low < high else NONE]
            for label, (_, (b, low, high)) in laws.items()]  # fmt: skip
    explained = f"{named(value).capitalize()} = a · {named(over)}^b, fitted over the logarithms, by the grids' steps."
    return [
        *parts,
        explained,
        markdown_table(["arm", "points", "exponent b", "95 % interval"], rows),
    ]


def draw(
    series: Series, over: str, value: str, path: Path, laws: Mapping[str, tuple[float, Interval]]
) -> None:
    """Writes the points with x on a logarithmic axis, joined by lines, or with the fitted power law where there is."""
    styles, points = (
        line_styles(list(series)),
        [point for line in series.values() for point in line],
    )
    places, has_bars = sorted(x for x, _ in points), any(y.sd for _, y in points)
    with style(8):
        figure, ax = plt.subplots(figsize=(COLUMN, 2.7))
        for i, (label, line) in enumerate(series.items()):
            colour, marker, dash = styles[label]
            x, y, sd = np.array(sorted((x, y.mean or np.nan, y.sd or np.nan) for x, y in line)).T
            beside = (places[-1] / places[0]) ** ((i - (len(series) - 1) / 2) * BESIDE)
            ax.errorbar(x * beside, y, yerr=sd if has_bars else None, fmt=marker, capsize=2, color=colour,
                        linestyle="none" if label in laws else dash, elinewidth=0.8, linewidth=1.2, label=label,
                        markersize=4)  # fmt: skip
            if label in laws:  # laws may coincide: their dashes keep them apart
                fine, (constant, exponent) = np.geomspace(x.min(), x.max(), 100), laws[label]
                law = constant * fine**exponent.median
                ax.plot(fine, law, linestyle=DASHES[i % len(DASHES)], color=colour, linewidth=1)
        ax.set_xscale("log")
        set_ticks(ax.xaxis, places)
        if value != "loss":
            ax.set_yscale("log")
            set_ticks(ax.yaxis, heights := [y.mean or 0.0 for _, y in points])
            ax.set_ylim(min(heights) / 1.3, max(heights) * 1.3)
        ax.grid()
        ax.set(xlabel=UNITS.get(over, named(over)), ylabel=UNITS.get(value, named(value)))
        explained = "bars: ± standard deviation over seeds" if has_bars else None
        figure.legend(loc="outside lower center", ncols=3, title=explained)
        save(figure, path)


def set_ticks(axis: Axis, values: Sequence[float]) -> None:
    """A tick for each value on a logarithmic axis if there is room for all, else one for each decade."""
    ticks = apart(values)
    if len(ticks) == 1 or min(np.diff(np.log(ticks))) > ROOM * math.log(ticks[-1] / ticks[0]):
        axis.set_ticks(ticks, labels=[short_number(tick) for tick in ticks])
        axis.set_minor_locator(NullLocator())


def apart(values: Sequence[float]) -> list[float]:
    """The values in order, without those that differ little from the one before."""
    kept: list[float] = []
    for value in sorted(values):
        kept += [value] if not kept or value > kept[-1] * ALIKE else []
    return kept
