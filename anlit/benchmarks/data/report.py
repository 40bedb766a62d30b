"""The measurements of `anlit benchmark data` as one table."""

from collections.abc import Iterable, Mapping
from typing import Any

from anlit.benchmarks.record import Table

HEADINGS = ("part", "program", "workers", "median", "quartiles", "beside")

Row = Mapping[str, Any]


def table(measurements: Iterable[Row]) -> Table:
    """All rows; rates in millions of tokens a second."""
    lines = [[row["part"], row["program"], str(row["workers"]), *_cells(row)] for row in measurements]
    return Table("From text to batches", HEADINGS, lines, left=(0, 1, 5))


def _cells(row: Row) -> tuple[str, str, str]:
    """Median, quartiles and what they are to be compared with."""
    if row["part"] == "memory":
        values = [value for series in row["megabytes"] for value in series]
        grown = ", ".join(f"{value:+.1f}" for value in row["growth_megabytes"])
        rate = row["rounds"][0]["tokens"] / row["rounds"][0]["seconds"] / 1e6
        beside = f"growth {grown} MB at {rate:.1f}M tokens/s"
        return f"{row['megabytes'][0][-1]:.0f} MB", f"{min(values):.0f} – {max(values):.0f}", beside
    if "import_seconds" in row:
        return (*_spread(row["seconds"], 1.0, " s"), f"and {row['import_seconds']['median']:.2f} s for imports")
    beside = ""
    if "wait_share" in row:
        longest = max(one["longest"] for one in row["rounds"])
        beside = f"idle {row['wait_share']['median']:.2%} of the time; a batch {1e3 * longest:.1f} ms at most"
    elif "beside_bare" in row:
        ratio = {kind: found["median"] for kind, found in row["beside_bare"].items()}
        beside = f"encode_batch: {ratio['per_worker']:.0%} per worker, {ratio['per_cpu_second']:.0%} by processor time"
    elif "beside_litgpt" in row:
        found = row["beside_litgpt"]
        beside = f"{found['median']:.2f} × litgpt ({found['low']:.2f} – {found['high']:.2f})"
    return (*_spread(row["tokens_per_second"], 1e6, "M"), beside)


def _spread(values: Mapping[str, Any], unit: float, name: str) -> tuple[str, str]:
    low, high = values["quartiles"]
    return f"{values['median'] / unit:,.2f}{name}", f"{low / unit:,.2f} – {high / unit:,.2f}"
