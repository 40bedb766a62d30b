"""The tables and the page of a benchmark, from its record."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anlit.reporting.table import NONE, Table
from anlit.reporting.text import three_digits

Row = dict[str, Any]
"""A case of the benchmark; `anlit.benchmarks.harness` describes the keys.

`seconds` has the times of a call by kind, such as `forward` and `both` (with the backward pass).
`flops` has its operations by kind.
"""
UNSTEADY = "*"
"""Marks a time with quartiles far apart (over 5 % of the median)."""
PEAKS = {
    "of measured peak": "peak_flops_per_second",
    "MFU": "data_sheet_flops_per_second",
}
"""Columns with shares of a peak, and the peak's key in the record (FLOP/s)."""


def benchmark_table(
    record: Mapping[str, Any],
    group: Mapping[str, Any],
    base: str,
    columns: Mapping[str, Callable[[Row], str]],
) -> Table:
    """Return the table of a group: a row for each case that was timed.

    Args:
        record: The benchmark's record.
        group: The group's record.
        base: The name of the model or kernel whose times are the divisor, for the column's head.
            The ratios themselves are in the record.
        columns: Further columns: their head, and the cell of a row.
    """
    peaks = {}
    for head, key in PEAKS.items():
        if record.get(key) is not None:
            peaks[head] = record[key]
    cells_of_rows = []
    for row in group["rows"]:
        if "seconds" in row:
            cells = _cells(row, base, peaks)
            for head, cell_of in columns.items():
                cells[head] = cell_of(row)
            if row["clocks"]:
                cells["MHz, W"] = "{mhz:.0f}, {watts:.0f}".format(**row["clocks"])
            cells_of_rows.append(cells)
    heads = list(cells_of_rows[0]) if cells_of_rows else [""]
    return Table(group["title"], heads, [list(cells.values()) for cells in cells_of_rows])


def _cells(row: Row, base: str, peaks: Mapping[str, float]) -> dict[str, str]:
    """Return the cells of a row by head.

    Each kind of time has a column. Quartiles, shares and ratio are of the last kind alone. It is
    the whole step or the forward and backward pass.
    """
    cells = {"": row["label"]}
    for kind, times in row["seconds"].items():
        mark = "" if times["steady"] else UNSTEADY
        cells[f"{kind}, ms"] = _milliseconds(times["median"]) + mark
    last_kind = list(row["seconds"])[-1]
    last_times = row["seconds"][last_kind]
    cells["quartiles"] = " – ".join(map(_milliseconds, last_times["quartiles"]))
    for head, peak in peaks.items():
        cells[head] = f"{row['flops'][last_kind] / last_times['median'] / peak:.1%}"
    ratio = row["ratio"].get(last_kind)
    cells[f"÷ {base} (95 %)"] = _ratio_with_interval(**ratio) if ratio else NONE
    peak_bytes = row["peak_bytes"]  # None where it cannot be measured
    cells["MB"] = NONE if peak_bytes is None else f"{peak_bytes / 1e6:.0f}"
    return cells


def _ratio_with_interval(median: float, low: float, high: float) -> str:
    has_interval = math.isfinite(low)  # too few rounds give no 95 % interval
    interval = f"{low:.3f} – {high:.3f}" if has_interval else "fewer than 6 rounds"
    return f"{median:.3f} ({interval})"


def _milliseconds(seconds: float) -> str:
    return three_digits(1e3 * seconds)


def benchmark_warnings(record: Mapping[str, Any]) -> list[str]:
    """Return a line for each case or group that was not timed, or not reliably."""
    lines = []
    for group in record["groups"]:
        title = group["title"]
        for row in group["rows"]:
            if row["reason"]:
                lines.append(f"Not timed: {title}: {row['label']}: {row['reason']}.")
        if not group.get("warm", True):
            lines.append(f"{title}: the clocks did not settle before the rounds began.")
        if not all(map(_is_steady, group["rows"])):
            lines.append(f"{title}: {UNSTEADY} quartiles more than 5 % apart: rely on the ratios.")
    if record["left_out"]:
        minutes = record["settings"]["minutes"]
        lines.append(f"Left out after {minutes:g} minutes: {'; '.join(record['left_out'])}.")
    return lines


def _is_steady(row: Row) -> bool:
    return all(times["steady"] for times in row.get("seconds", {}).values())


def benchmark_page(record: Mapping[str, Any], tables: Sequence[Table], notes: Sequence[str]) -> str:
    """Return the Markdown page: hardware, command, tables, notes."""
    hardware = record["environment"]["hardware"]
    machine = hardware["device"]
    if machine == "cpu":
        machine = f"{hardware['cpu']}, {hardware['threads']} threads"
    paragraphs = [f"# anlit benchmark {record['benchmark']}: {machine}", f"`{record['command']}`"]
    for table in tables:
        paragraphs += [f"## {table.title}", table.markdown()]
    return "\n\n".join([*paragraphs, *notes]) + "\n"
