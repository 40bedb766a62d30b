"""The heat maps of the needle task: accuracy over depth and length, a panel for each arm."""

import textwrap
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from anlit.reporting.figure import TEXT, heat_map, legend_name

COLUMNS, MOST_COLUMNS = 3, 18
"""Panels in a row, and columns of cells that fit into it."""
MOST_CELLS = 12
"""Columns of cells in a row of panels that have room for numbers."""
FEW_DEPTHS = 11
"""Up to so many depths the cells show their numbers."""


def plot(record: dict[str, Any]) -> Figure:
    """A panel for each arm, with the first depth on top and the shortest length on the left."""
    arms, lengths, depths = record["arms"], record["settings"]["lengths"], record["settings"]["depths"]
    columns = min(len(arms), COLUMNS, max(1, MOST_COLUMNS // len(lengths)))
    n_rows = -(-len(arms) // columns)
    numbers = columns * len(lengths) <= MOST_CELLS and len(depths) <= FEW_DEPTHS
    height = 0.9 + n_rows * (0.5 + 0.16 * max(5, len(depths)))
    figure, grid = plt.subplots(n_rows, columns, figsize=(TEXT, height), squeeze=False)
    axes = [*grid.flat][: len(arms)]
    for ax in [*grid.flat][len(arms) :]:
        ax.remove()
    for number, (ax, arm) in enumerate(zip(axes, arms, strict=True)):
        picture = _draw(ax, record, arm, numbers, width=75 // columns)
        first, last = number % columns == 0, number + columns >= len(arms)  # in its row; in its column
        ax.tick_params(length=0, labelleft=first, labelbottom=last)
    times = ", and in training lengths" if len(_training_lengths(record)) == 1 else ""
    figure.supxlabel(f"length (tokens{times})", fontsize=8)
    figure.supylabel("depth of the needle (% of the text)", fontsize=8)
    figure.colorbar(picture, ax=axes, label="exact-match accuracy", ticks=np.linspace(0, 1, 6), pad=0.02, aspect=30)
    return figure


def _draw(ax: Axes, record: dict[str, Any], arm: dict[str, Any], numbers: bool, width: int) -> AxesImage:
    lengths, depths = record["settings"]["lengths"], record["settings"]["depths"]
    seeds = len(arm["checkpoints"])
    picture = heat_map(ax, by_depth(record, arm), 1.0, numbers)
    told = f" ({seeds}\N{NO-BREAK SPACE}seeds)" if seeds > 1 else ""
    ax.set_title(textwrap.fill(legend_name(arm["label"]) + told, width))
    every = max(1, round(len(lengths) / 6))
    shown = range(0, len(lengths), every)
    ax.set_xticks(shown, [length_name(record, lengths[place]).replace(" ", "\n") for place in shown])
    shown = range(0, len(depths), max(1, round((len(depths) - 1) / 10)))
    ax.set_yticks(shown, [f"{100 * depths[row]:.0f}" for row in shown])
    ax.spines[:].set_visible(False)
    return picture


def by_depth(record: dict[str, Any], arm: dict[str, Any]) -> np.ndarray:
    """(depths, lengths) accuracy, mean over seeds and samples."""
    shares = [
        [[own["matches"] / own["samples"] for own in scores["by_depth"]] for scores in record["measurements"][member]]
        for member in arm["checkpoints"]
    ]
    means: np.ndarray = np.mean(shares, axis=0).T
    return means


def length_name(record: dict[str, Any], length: int) -> str:
    """`1,024 (4×)`; without the multiple if the models were trained at different lengths."""
    trained = _training_lengths(record)
    times = f" ({length / trained[0]:g}×)" if len(trained) == 1 else ""
    return f"{length:,}{times}"


def _training_lengths(record: dict[str, Any]) -> list[int]:
    return sorted({own["training_length"] for own in record["checkpoints"]})
