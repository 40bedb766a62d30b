"""The picture of a study's trends, and what settings are called."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt

from anlit.reporting.figure import line_styles, save, style
from anlit.reporting.intervals import PowerLaw
from anlit.reporting.text import short_number

NAMES = {"tokens": "training tokens", "flops": "training compute", "lr": "learning rate", "batch_size": "batch size",
         "tau": "τ", "d_model": "width", "tokens_per_parameter": "tokens per parameter"}  # fmt: skip
"""Names of settings in headings and sentences; other settings have their name in the YAML."""
UNITS = {"flops": "training compute (6 N D, FLOPs)", "lr": "peak learning rate", "batch_size": "batch size (sequences)",
         "loss": "validation loss (nats per token)"}  # fmt: skip
# The factor by which lines at one x are moved apart, so that their error bars do not overlap.
APART = 1.02
# Ticks nearer than this factor would be written over one another; arms of one width have slightly different parameters.
TICKS_APART = 1.1


def trends(
    series: dict[str, list[tuple[float, float, float]]],
    over: str,
    value: str,
    path: Path,
    curves: Mapping[str, PowerLaw],
) -> None:
    """Writes lines of (x, y, standard deviation of y), with x on a logarithmic axis, and fitted power laws."""
    with style():
        figure, ax = plt.subplots(figsize=(6.75, 3.8))
        drawn = line_styles(list(series))
        for i, (label, found) in enumerate(series.items()):
            colour, marker, dash = drawn[label]
            x, y, sd = (np.array(column) for column in zip(*sorted(found), strict=True))
            fitted = curves.get(label)
            beside = x * APART ** (i - (len(series) - 1) / 2)  # error bars stand side by side
            ax.errorbar(beside, y, yerr=np.where(sd > 0, sd, np.nan), fmt=marker, linestyle="none" if fitted else dash,
                        color=colour, capsize=2, elinewidth=1, label=label, markersize=5.5)  # fmt: skip
            if fitted is not None:
                fine = np.geomspace(x.min(), x.max(), 100)
                ax.plot(fine, fitted(fine), "-", color=colour, linewidth=1.5)
        ax.set_xscale("log")
        if value != "loss":
            ax.set_yscale("log")
            heights = sorted({y for found in series.values() for _, y, _ in found})
            ax.set_yticks(heights, [short_number(y) for y in heights])
            ax.set_ylim(heights[0] / 1.3, heights[-1] * 1.3)
        shown = _apart(sorted({x for found in series.values() for x, _, _ in found}))
        ax.set_xticks(shown, [short_number(x) for x in shown])
        ax.minorticks_off()
        ax.grid()
        ax.set_xlabel(axis_label(over))
        ax.set_ylabel(axis_label(value))
        has_bars = any(sd > 0 for found in series.values() for *_, sd in found)
        explained = "bars: ± standard deviation over seeds" if has_bars else None
        figure.legend(loc="outside lower center", ncols=3, title=explained)
        save(figure, path)


def _apart(ticks: list[float]) -> list[float]:
    """Of ascending ticks those that have room, the first of each crowd."""
    kept: list[float] = []
    for tick in ticks:
        if not kept or tick > kept[-1] * TICKS_APART:
            kept.append(tick)
    return kept


def named(key: str) -> str:
    """A setting's name for readers."""
    return NAMES.get(key, key)


def axis_label(key: str) -> str:
    """A setting's name with its unit."""
    return UNITS.get(key, named(key))
