"""The heat maps of the needle task: accuracy over depth and length, a panel for each arm."""

import math
import textwrap
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.image import AxesImage

from anlit.evaluation.needle.tables import ArmScores, Results
from anlit.reporting.figure import heat_map, save, style

COLUMNS = 4
FEW_ROWS, FEW_COLUMNS = 11, 6
"""Tables of up to this size show the numbers in their cells."""
CELL = 0.85
"""Width of a length's column in inches."""


def plot_heat_maps(results: Results, path: Path) -> None:
    """Write the figure as PNG and PDF."""
    arms, lengths, depths = results.arms, results.lengths, results.depths
    rows = math.ceil(len(arms) / COLUMNS)
    columns = math.ceil(len(arms) / rows)
    size = (1.9 + columns * max(2.4, CELL * len(lengths)), rows * (1.5 + 0.27 * max(6, len(depths))))
    with style():
        figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False)
        axes = [*grid.flat][: len(arms)]
        for ax in [*grid.flat][len(arms) :]:
            ax.remove()
        for number, (ax, arm) in enumerate(zip(axes, arms, strict=True)):
            picture = _draw(ax, arm, results)
            first, last = number % columns == 0, number + columns >= len(arms)  # in its row; in its column
            ax.tick_params(length=0, labelleft=first, labelbottom=last)
        times = ", and in training lengths" if len(results.training_lengths) == 1 else ""
        figure.supxlabel(f"length (tokens{times})", fontsize=10)
        figure.supylabel("depth of the needle (% of the text)", fontsize=10)
        figure.colorbar(picture, ax=axes, label="exact-match accuracy", ticks=np.linspace(0, 1, 6), pad=0.02)
        save(figure, path)


def _draw(ax: Axes, arm: ArmScores, results: Results) -> AxesImage:
    """Draw one panel, with the first depth on top and the shortest length on the left."""
    depths, lengths = results.depths, results.lengths
    table = np.stack([arm.by_depth(length) for length in lengths], axis=1)
    picture = heat_map(ax, table, 1.0, numbers=len(depths) <= FEW_ROWS and len(lengths) <= FEW_COLUMNS)
    width = 26 if len(lengths) < 4 else 34
    seeds = f" ({arm.n_seeds}\N{NO-BREAK SPACE}seeds)" if arm.n_seeds > 1 else ""
    ax.set_title(textwrap.fill(arm.label + seeds, width), loc="left", fontsize=10)
    ax.set_xticks(range(len(lengths)), [results.name(length).replace(" ", "\n") for length in lengths])
    shown = range(0, len(depths), max(1, round((len(depths) - 1) / 10)))
    ax.set_yticks(shown, [f"{100 * depths[row]:.0f}" for row in shown])
    ax.spines[:].set_visible(False)
    return picture
