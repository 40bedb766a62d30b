"""The section `trend`: loss, or the best value of a setting, over another value; and how settings are called."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axis import Axis
from matplotlib.ticker import NullLocator

from anlit.analysis.statistics import Interval, Summary, power_law
from anlit.analysis.study.results import StudyResults
from anlit.reporting.figure import COLUMN, DASHES, line_styles, save, style
from anlit.reporting.table import NONE, markdown_table
from anlit.reporting.text import short_number

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
Series = Mapping[str, Sequence[tuple[float, float, float]]]
"""Label → points (x, y, standard deviation of y)."""


def named(key: str) -> str:
    """A setting's name for readers."""
    return NAMES.get(key, key)


def trend(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """Options: `over`, and `value` (default: loss), names of settings or of what a `Point` has; `arms`."""
    value, over, arms = options.get("value", "loss"), options["over"], options.get("arms")
    is_loss, over_name = value == "loss", named(over)
    series: dict[str, list[tuple[float, float, float]]] = {}
    for point in results.points():
        if point.losses and (arms is None or point.arm.base in arms):
            loss = Summary(point.losses)
            y = (loss.mean or 0.0, loss.sd or 0.0) if is_loss else (point.number(value), 0.0)
            series.setdefault(results.study.title_of(point.arm.base), []).append((point.number(over), *y))
    title = f"## {'Loss' if is_loss else f'Best {named(value)}'} over {over_name}"
    if not series:
        return [title, "No run has finished yet."]
    fitted = {label: power_law([x for x, *_ in line], [y for _, y, _ in line])
              for label, line in series.items() if not is_loss}  # fmt: skip
    laws = {label: law for label, law in fitted.items() if law is not None}
    path = results.output / f"trend-{value}-{over}.png"
    draw(series, over, value, path, laws)
    parts = [title, f"![{value} over {over}]({path.name})"]
    if is_loss:
        rows = [[label, short_number(x), f"{y:.4f}" + (f" ± {sd:.4f}" if sd else "")]
                for label, line in series.items() for x, y, sd in sorted(line)]  # fmt: skip
        return [*parts, markdown_table(["arm", over_name, "validation loss (nats/token)"], rows)]
    rows = [[label, str(len(series[label])), f"{b:.2f}", f"{low:.2f} … {high:.2f}" if low < high else NONE]
            for label, (_, (b, low, high)) in laws.items()]  # fmt: skip
    law = (f"{named(value).capitalize()} = a · {over_name}^b, fitted over the logarithms. A grid's best value is known "
           "no finer than its steps.")  # fmt: skip
    return [*parts, law, markdown_table(["arm", "points", "exponent b", "95 % interval"], rows)]


def draw(series: Series, over: str, value: str, path: Path, laws: Mapping[str, tuple[float, Interval]]) -> None:
    """Writes the points with x on a logarithmic axis, joined by lines, or with the fitted power law where there is."""
    styles = line_styles(list(series))
    places = sorted(x for line in series.values() for x, _, _ in line)
    has_bars = any(sd > 0 for line in series.values() for *_, sd in line)
    with style(8):
        figure, ax = plt.subplots(figsize=(COLUMN, 2.7))
        for i, (label, line) in enumerate(series.items()):
            colour, marker, dash = styles[label]
            x, y, sd = (np.array(column) for column in zip(*sorted(line), strict=True))
            beside = (places[-1] / places[0]) ** ((i - (len(series) - 1) / 2) * BESIDE)
            bars = np.where(sd > 0, sd, np.nan) if has_bars else None
            ax.errorbar(x * beside, y, yerr=bars, fmt=marker, capsize=2, linestyle="none" if label in laws else dash,
                        color=colour, elinewidth=0.8, linewidth=1.2, label=label, markersize=4)  # fmt: skip
            if label in laws:  # laws may coincide: their dashes keep them apart
                fine = np.geomspace(x.min(), x.max(), 100)
                constant, exponent = laws[label]
                ax.plot(
                    fine, constant * fine**exponent.median, linestyle=DASHES[i % len(DASHES)], color=colour, linewidth=1
                )
        ax.set_xscale("log")
        set_ticks(ax.xaxis, places)
        if value != "loss":
            ax.set_yscale("log")
            set_ticks(ax.yaxis, heights := [y for line in series.values() for _, y, _ in line])
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
