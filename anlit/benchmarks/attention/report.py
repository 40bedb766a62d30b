"""The results of `anlit benchmark attention` as tables."""

from collections.abc import Mapping
from typing import Any

from anlit.benchmarks.record import Table
from anlit.benchmarks.turns import paired_ratio

HEADINGS = ("mechanism, kernel", "fwd, ms", "both, ms", "quartiles", "of peak", "÷ first", "MB", "error")

Row = Mapping[str, Any]


def ratio(row: Row, other: Row) -> float:
    """Median over the rounds of how many times the other's time a row took, forward and backward."""
    return paired_ratio({"a": row["both"]["values"], "b": other["both"]["values"]}, "a", "b").median


def table(shape: Mapping[str, Any]) -> Table:
    """The entrants that were timed on one shape, beside the first of them."""
    rows = [row for row in shape["entrants"] if row["reason"] is None]
    sizes = shape["shape"]
    heading = f"{sizes['label']}, {sizes['batch']} × {sizes['heads']} heads"
    return Table(heading, HEADINGS, [_cells(row, rows[0]) for row in rows])


def notes(shape: Mapping[str, Any]) -> list[str]:
    """Why the others were not."""
    label = shape["shape"]["label"]
    return [
        f"not timed: {label}: {row['label']}: {row['reason']}" for row in shape["entrants"] if row["reason"] is not None
    ]


def _cells(row: Row, first: Row) -> list[str]:
    low, high = row["both"]["quartiles"]
    return [
        row["label"],
        f"{row['forward']['median'] * 1e3:.3g}",
        f"{row['both']['median'] * 1e3:.3g}",
        f"{low * 1e3:.3g} – {high * 1e3:.3g}",
        f"{row['both_of_peak']:.0%}",
        f"{ratio(row, first):.2f} ×",
        "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}",
        f"{max(row['error'].values()):.0e}",
    ]
