"""One style for all figures: each architecture and mechanism has the same colour and marker in all figures.

With several architectures the colour is the architecture's, and the marker the mechanism's if there are several. With
one architecture both are the mechanism's. Lines that would still be alike differ in marker and dashes.
"""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
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

DPI = 150
COLUMN, TEXT = 3.35, 6.75
"""Widths of figures for a paper in inches: one column (85 mm), and the text of a page."""
INK = "#333333"
# Okabe and Ito's palette without its yellow, which is too light for a line on white.
COLOURS = BLUE, RED, GREEN, PURPLE, ORANGE, SKY = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
)
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (8, 2, 1, 2, 1, 2)), (0, (9, 4)))
MAP = "cividis"  # readable with every kind of colour vision and in grey
BASELINE_LINE: Any = (0, (5, 4))
SHADE: Any = {"color": "0.93", "linewidth": 0, "zorder": 0}  # behind what no training has seen
SHADED = Patch(**SHADE, label="longer than in training")
NAMES = {"SqrtLogN": "√(2 log n)", "LogN": "log n"}  # in a legend
LETTER = 0.06  # mean width in a legend, in inches


class LineStyle(NamedTuple):
    """How a line looks."""

    colour: str
    marker: str
    dash: Any


ARCHITECTURES = {"GPT+": (INK, "o"), "nGPT": (RED, "^"), "anGPT": (BLUE, "s")}
MECHANISMS = {
    "plain": (INK, "o"), "scale-invariant": (BLUE, "s"), "LogN": (RED, "^"), "SqrtLogN": (GREEN, "v"),
    "√(2 log n)": (GREEN, "v"), "dynamic NTK": (PURPLE, "D"), "ALiBi": (ORANGE, "P"), "window": (SKY, "X"),
    "p-RoPE": (SKY, "<"), "no positions": (ORANGE, ">"), "log-bias": (SKY, "p"), "log bias": (SKY, "p"),
    "beta": (PURPLE, "h"), "expected-maximum": (RED, "*"),
}  # fmt: skip
"""By the name in a label, also of position encodings that stand for a mechanism."""
MARKERS = ("o", "s", "^", "D", "v", "P")


def line_styles(labels: Sequence[str]) -> dict[str, LineStyle]:
    """The look of each label's line in a figure that has all of them."""
    words = [(_word(label, ARCHITECTURES), _word(label, MECHANISMS)) for label in labels]
    one_mechanism = len({mechanism or "plain" for _, mechanism in words}) == 1
    by_architecture = one_mechanism or len({architecture for architecture, _ in words}) > 1
    spare = [colour for colour in COLOURS if not by_architecture or colour not in (BLUE, RED)]
    styles: dict[str, LineStyle] = {}
    for number, (label, (architecture, mechanism)) in enumerate(zip(labels, words, strict=True)):
        colour, marker = MECHANISMS[mechanism or "plain"]
        if by_architecture and architecture is not None:
            colour, own = ARCHITECTURES[architecture]
            marker = own if one_mechanism else marker
        elif architecture is None and mechanism is None:  # unknown: the next free colour
            colour, marker = spare[number % len(spare)], MARKERS[number % len(MARKERS)]
        taken = [style.marker for style in styles.values() if style.colour == colour]
        if marker in taken:
            marker = next((other for other in MARKERS if other not in taken), marker)
        styles[label] = LineStyle(colour, marker, DASHES[number % len(DASHES)])
    return styles


def shade(ax: Axes, begin: float) -> None:
    """Shade x from `begin` on, what is longer than any training."""
    low, high = ax.get_xlim()
    if begin < high:
        ax.axvspan(max(begin, low), high, **SHADE)
    ax.set_xlim(low, high)


def legend_name(label: str) -> str:
    """A label with its mechanism's formula, √(2 log n) for SqrtLogN."""
    return re.sub(rf"(?<![\w-])({'|'.join(NAMES)})(?![\w-])", lambda name: NAMES[name[0]], label)


def legend_below(
    figure: Figure, handles: Sequence[Any], columns: int = 2, title: str | None = None
) -> None:
    """A legend below the panels, row by row, in as many of `columns` as have room."""
    for handle in handles:
        handle.set_label(legend_name(handle.get_label()))
    longest = max(len(handle.get_label()) for handle in handles)
    columns = max(
        1, min(columns, len(handles), int(figure.get_figwidth() / (LETTER * (longest + 6))))
    )
    # matplotlib fills column after column
    ordered = [
        handles[place]
        for column in range(columns)
        for place in range(column, len(handles), columns)
    ]
    figure.legend(
        handles=ordered, loc="outside lower center", ncols=columns, handlelength=3.2, title=title
    )


def _word(label: str, names: dict[str, Any]) -> str | None:
    """The name in `names` that is a word of a label; the longest of several."""
    matches = [
        name
        for name in names
        if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", label, re.IGNORECASE)
    ]
    return max(matches, key=len, default=None)


def style(size: float = 10) -> AbstractContextManager[None]:
    """The matplotlib settings for making and writing a figure, with text of a size in points."""
    return plt.rc_context({
        "font.size": size, "axes.titlesize": size, "axes.titlelocation": "left", "axes.edgecolor": INK,
        "axes.spines.top": False, "axes.spines.right": False, "axes.unicode_minus": True,
        "axes.formatter.useoffset": False, "grid.alpha": 0.25, "grid.linewidth": 0.6, "legend.frameon": False,
        "figure.constrained_layout.use": True, "savefig.facecolor": "white",  # also on a dark page
        "pdf.fonttype": 42,  # keep text as text
        "svg.hashsalt": "anlit",  # the same figure is the same file
    })  # fmt: skip


def panels(
    count: int, columns: int, width: float = 3.2, height: float = 2.6
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels, `columns` in a row, of a size in inches each."""
    columns = min(columns, count)
    n_rows = -(-count // columns)
    figure, grid = plt.subplots(
        n_rows, columns, figsize=(width * columns, height * n_rows + 0.9), squeeze=False
    )
    for number, ax in enumerate(grid.flat):
        ax.grid() if number < count else ax.set_axis_off()
    return figure, list(grid.flat[:count])


def heat_map(ax: Axes, table: np.ndarray, top: float, numbers: bool) -> AxesImage:
    """Draw (rows, columns) in colours for every kind of vision from 0 to `top`, with the numbers if they are wanted."""
    image = ax.imshow(table, cmap=MAP, vmin=0, vmax=top, aspect="auto", interpolation="nearest")
    for (row, column), value in np.ndenumerate(table) if numbers else ():
        colour = "white" if value < top / 2 else "black"
        ax.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    return image


def save(figure: Figure, path: Path) -> None:
    """Write `figure` as PNG of 256 colours for pages, and as PDF and SVG for papers; then close it.

    Dollar signs in labels do not begin formulas. Numbers on logarithmic axes stay formulas.
    """
    for text in figure.findobj(Text):
        shown = text.get_text()  # type: ignore[attr-defined]
        if "$" in shown and "mathdefault" not in shown:
            text.set_parse_math(False)  # type: ignore[attr-defined]
    try:
        figure.savefig(path, dpi=DPI)
        figure.set_layout_engine(
            "none"
        )  # PDF and SVG keep this layout, which takes as long as the drawing
        with Image.open(path) as image:  # a third of the bytes
            reduced = image.convert("RGB").quantize(dither=Image.Dither.NONE)
        reduced.save(path, optimize=True)
        figure.savefig(
            path.with_suffix(".pdf"),
            metadata={"CreationDate": None, "Producer": None, "Creator": None},
        )
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
    finally:
        plt.close(figure)
