"""The picture of a study's trends, and what settings are called."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axis import Axis
from matplotlib.ticker import NullLocator

from anlit.reporting.figure import COLUMN, DASHES, line_styles, save, style
from anlit.reporting.intervals import PowerLaw
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


def trends(
    series: dict[str, list[tuple[float, float, float]]],
    over: str,
    value: str,
    path: Path,
    curves: Mapping[str, PowerLaw],
) -> None:
    """Writes lines of (x, y, standard deviation of y), with x on a logarithmic axis, and fitted power laws."""
    with style(8):
        figure, ax = plt.subplots(figsize=(COLUMN, 2.7))
        drawn = line_styles(list(series))
        places = sorted(x for found in series.values() for x, _, _ in found)
        has_bars = any(sd > 0 for found in series.values() for *_, sd in found)
        for i, (label, found) in enumerate(series.items()):
            colour, marker, dash = drawn[label]
            x, y, sd = (np.array(column) for column in zip(*sorted(found), strict=True))
            fitted = curves.get(label)
            beside = (places[-1] / places[0]) ** ((i - (len(series) - 1) / 2) * BESIDE)
            bars = np.where(sd > 0, sd, np.nan) if has_bars else None
            line = "none" if fitted else dash
            ax.errorbar(x * beside, y, yerr=bars, fmt=marker, capsize=2, linestyle=line, color=colour, elinewidth=0.8,
                        linewidth=1.2, label=label, markersize=4)  # fmt: skip
            if fitted is not None:  # laws may coincide: their dashes keep them apart
                fine = np.geomspace(x.min(), x.max(), 100)
                ax.plot(fine, fitted(fine), linestyle=DASHES[i % len(DASHES)], color=colour, linewidth=1)
        ax.set_xscale("log")
        set_ticks(ax.xaxis, places)
        if value != "loss":
            ax.set_yscale("log")
            set_ticks(ax.yaxis, heights := [y for found in series.values() for _, y, _ in found])
            ax.set_ylim(min(heights) / 1.3, max(heights) * 1.3)
        ax.grid()
        ax.set_xlabel(axis_label(over))
        ax.set_ylabel(axis_label(value))
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
        if not kept or value > kept[-1] * ALIKE:
            kept.append(value)
    return kept


def named(key: str) -> str:
    """A setting's name for readers."""
    return NAMES.get(key, key)


def axis_label(key: str) -> str:
    """A setting's name with its unit."""
    return UNITS.get(key, named(key))
