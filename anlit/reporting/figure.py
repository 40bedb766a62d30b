"""One style for all figures: an architecture or mechanism always has the same colour and marker.

With several architectures, the colour shows the architecture, and the marker shows the mechanism if
there are several. With one architecture, both show the mechanism. Lines that would still be alike
differ in marker and dashes.

If two lines have the same architecture and mechanism, the line with the shorter label has the
colour of its name. The other has a colour that no name in the figure has. This holds up to seven
lines.
"""

import re
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch
from matplotlib.text import Text
from PIL import Image

from anlit.reporting.page import PLOT_DPI

COLUMN_WIDTH = 3.35
"""Width of a figure in one column of a paper (85 mm), in inches."""
TEXT_WIDTH = 6.75
"""Width of a figure across the text of a page, in inches."""
TEXT_POINTS = 8
"""Size of a figure's text."""
LETTER_WIDTH = 0.06
"""Mean width of a letter in a legend, in inches."""
LEGEND_LINE = 10
"""Width of a legend's line and margins, in letters."""
INK = "#333333"
# Okabe and Ito's palette without its yellow, which is too light for a line on white.
BLUE = "#0072B2"
RED = "#D55E00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
ORANGE = "#E69F00"
SKY = "#56B4E9"
SPARE_COLOURS = (GREEN, PURPLE, ORANGE, SKY)
"""Colours of labels without a known name."""
PALETTE = (*SPARE_COLOURS, INK, RED, BLUE)
"""All colours of lines. The last three are those of the architectures."""
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (8, 2, 1, 2, 1, 2)), (0, (9, 4)))
COLOUR_MAP = "cividis"
"""Readable with every kind of colour vision and in grey."""
BASELINE_LINE: Any = (0, (5, 4))
SHADE_STYLE: Any = {"color": "0.93", "linewidth": 0, "zorder": 0}
"""Behind lengths that no training has seen."""
SHADED = Patch(**SHADE_STYLE, label="longer than in training")
LEGEND_NAMES = {"SqrtLogN": "√(2 log n)", "LogN": "log n"}
"""Mechanisms that a legend shows by their formula."""


class LineStyle(NamedTuple):
    """The look of a line."""

    colour: Any
    marker: str
    dash: Any


ARCHITECTURES = {"GPT+": (INK, "o"), "nGPT": (RED, "^"), "anGPT": (BLUE, "s")}
"""Colour and marker, by the name in a label."""
MECHANISMS = {
    "plain": (INK, "o"),
    "scale-invariant": (BLUE, "s"),
    "LogN": (RED, "^"),
    "SqrtLogN": (GREEN, "v"),
    "√(2 log n)": (GREEN, "v"),
    "dynamic NTK": (PURPLE, "D"),
    "ALiBi": (ORANGE, "P"),
    "window": (SKY, "X"),
    "p-RoPE": (SKY, "<"),
    "no positions": (ORANGE, ">"),
    "log-bias": (SKY, "p"),
    "log bias": (SKY, "p"),
    "beta": (PURPLE, "h"),
    "expected-maximum": (RED, "*"),
}
"""Colour and marker, by the name in a label; also position encodings that stand for a mechanism."""
MARKERS = ("o", "s", "^", "D", "v", "P")


def line_styles(labels: Sequence[str]) -> dict[str, LineStyle]:
    """Return the look of each label's line in a figure that has all of them."""
    architectures = [_find_name(label, ARCHITECTURES) for label in labels]
    mechanisms = [_find_name(label, MECHANISMS) for label in labels]
    has_one_mechanism = len({mechanism or "plain" for mechanism in mechanisms}) == 1
    by_architecture = has_one_mechanism or len(set(architectures)) > 1
    styles: dict[str, LineStyle] = {}
    # The shortest first, so that a name alone has its own marker in every figure.
    for number in sorted(range(len(labels)), key=lambda number: len(labels[number])):
        label = labels[number]
        architecture = architectures[number]
        mechanism = mechanisms[number]
        colour, marker = MECHANISMS[mechanism or "plain"]
        if by_architecture and architecture is not None:
            colour, architecture_marker = ARCHITECTURES[architecture]
            if has_one_mechanism:
                marker = architecture_marker
        elif architecture is None and mechanism is None:  # unknown: the next free colour
            colour = SPARE_COLOURS[number % len(SPARE_COLOURS)]
            marker = MARKERS[number % len(MARKERS)]
        marker = _free_marker(marker, colour, list(styles.values()))
        look = LineStyle(colour, marker, DASHES[number % len(DASHES)])
        if look in styles.values():  # more lines of this colour than markers
            look = _unused_look(look, list(styles.values()))
        styles[label] = look
    if len(styles) <= len(PALETTE):
        shows_mechanism = by_architecture and not has_one_mechanism
        mechanism_of = dict(zip(labels, mechanisms, strict=True)) if shows_mechanism else {}
        styles = _with_different_colours(styles, mechanism_of)
    return {label: styles[label] for label in labels}


def _with_different_colours(
    styles: dict[str, LineStyle], mechanism_of: dict[str, str | None]
) -> dict[str, LineStyle]:
    """Give a free colour to each line whose colour and mechanism an earlier line has.

    `mechanism_of` is empty if no marker shows a mechanism.
    """
    named_colours = {look.colour for look in styles.values()}
    free_colours = [colour for colour in PALETTE if colour not in named_colours]
    taken: set[tuple[str, str]] = set()
    changed_styles = {}
    for label, look in styles.items():
        meaning = look.colour, mechanism_of.get(label) or "plain"
        if meaning in taken:
            look = look._replace(colour=free_colours.pop(0))
        taken.add(meaning)
        changed_styles[label] = look
    return changed_styles


def _free_marker(marker: str, colour: str, styles: Sequence[LineStyle]) -> str:
    """Return `marker`, or a different marker if a line of this colour has it."""
    taken = {style.marker for style in styles if style.colour == colour}
    if marker not in taken:
        return marker
    return next((candidate for candidate in MARKERS if candidate not in taken), marker)


def _unused_look(look: LineStyle, styles: Sequence[LineStyle]) -> LineStyle:
    """Return the first pair of marker and dashes that no line of this colour has."""
    for marker, dash in product(MARKERS, DASHES):
        candidate = LineStyle(look.colour, marker, dash)
        if candidate not in styles:
            return candidate
    return look


def shade(ax: Axes, begin: float) -> None:
    """Shade x from `begin` on, the lengths beyond any training."""
    low, high = ax.get_xlim()
    if begin < high:
        ax.axvspan(max(begin, low), high, **SHADE_STYLE)
    ax.set_xlim(low, high)


def legend_name(label: str) -> str:
    """Return a label with its mechanism's formula, √(2 log n) for SqrtLogN."""
    pattern = rf"(?<![\w-])({'|'.join(LEGEND_NAMES)})(?![\w-])"
    return re.sub(pattern, lambda name: LEGEND_NAMES[name[0]], label)


def legend_below(
    figure: Figure, handles: Sequence[Any], columns: int = 2, title: str | None = None
) -> None:
    """Draw a legend below the panels, row by row, in at most `columns` columns that fit.

    A label that is longer than the figure is wide has several lines.
    """
    letters = int(figure.get_figwidth() / LETTER_WIDTH)
    for handle in handles:
        label = legend_name(handle.get_label())
        handle.set_label(textwrap.fill(label, letters - LEGEND_LINE))
    longest = max(len(handle.get_label()) for handle in handles)
    fitting_columns = letters // (longest + LEGEND_LINE)
    columns = max(1, min(columns, len(handles), fitting_columns))
    ordered_handles: list[Any] = []
    for column in range(columns):  # matplotlib fills column after column
        ordered_handles += handles[column::columns]
    figure.legend(
        handles=ordered_handles,
        loc="outside lower center",
        ncols=columns,
        handlelength=3.2,
        title=title,
    )


def _find_name(label: str, names: dict[str, Any]) -> str | None:
    """Return the longest of `names` that is a word of a label, or None."""
    matches = []
    for name in names:
        if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", label, re.IGNORECASE):
            matches.append(name)
    return max(matches, key=len, default=None)


def style(size: float = TEXT_POINTS) -> AbstractContextManager[None]:
    """Return the matplotlib settings of a figure with text of `size` points."""
    return plt.rc_context(
        {
            "font.size": size,
            "axes.titlesize": size,
            "axes.titlelocation": "left",
            "axes.edgecolor": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.unicode_minus": True,
            "axes.formatter.useoffset": False,
            "grid.alpha": 0.25,
            "grid.linewidth": 0.6,
            "legend.frameon": False,
            "figure.constrained_layout.use": True,
            "savefig.facecolor": "white",  # also on a dark page
            "pdf.fonttype": 42,  # keep text as text
            "svg.hashsalt": "anlit",  # the same figure is the same file
        }
    )


def panels(
    count: int, columns: int, width: float = 3.2, height: float = 2.6
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels, `columns` in a row; a panel's size is in inches."""
    columns = min(columns, count)
    n_rows = -(-count // columns)
    figure, grid = plt.subplots(
        n_rows, columns, figsize=(width * columns, height * n_rows + 0.9), squeeze=False
    )
    axes = list(grid.flat)
    for ax in axes[:count]:
        ax.grid()
    for ax in axes[count:]:
        ax.set_axis_off()
    return figure, axes[:count]


def heat_map(ax: Axes, table: np.ndarray, top: float, numbers: bool) -> AxesImage:
    """Draw (rows, columns) in colours from 0 to `top`, with or without the numbers."""
    image = ax.imshow(
        table, cmap=COLOUR_MAP, vmin=0, vmax=top, aspect="auto", interpolation="nearest"
    )
    if numbers:
        for (row, column), value in np.ndenumerate(table):
            colour = "white" if value < top / 2 else "black"
            ax.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    return image


def save(figure: Figure, path: Path) -> None:
    """Write `figure` as PNG of 256 colours for pages, and as PDF and SVG for papers; then close it.

    Dollar signs in labels do not begin formulas. Numbers on logarithmic axes stay formulas.
    """
    for text in figure.findobj(Text):
        content = text.get_text()  # type: ignore[attr-defined]
        if "$" in content and "mathdefault" not in content:
            text.set_parse_math(False)  # type: ignore[attr-defined]
    try:
        figure.savefig(path, dpi=PLOT_DPI)
        # PDF and SVG reuse this layout: making it takes as long as the drawing.
        figure.set_layout_engine("none")
        with Image.open(path) as image:  # a third of the bytes
            reduced = image.convert("RGB").quantize(dither=Image.Dither.NONE)
        reduced.save(path, optimize=True)
        no_dates = {"CreationDate": None, "Producer": None, "Creator": None}
        figure.savefig(path.with_suffix(".pdf"), metadata=no_dates)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
    finally:
        plt.close(figure)
