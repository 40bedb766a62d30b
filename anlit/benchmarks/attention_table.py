"""The results of `anlit benchmark attention` as tables, and beside the targets."""

import statistics
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from anlit.benchmarks.data_table import BUSY_LOAD, WIDTH

HEADINGS = (
    "mechanism",
    "kernel",
    "forward, ms",
    "and backward, ms",
    "least – greatest",
    "TFLOP/s",
    "of peak",
    "beside the first",
    "MB",
    "error",
)
FASTER_THAN_FLEX, BESIDE_FLASH, BESIDE_PLAIN, FROM_LENGTH = 1.5, 1.25, 1.02, 4096


def ratio(row: Mapping[str, Any], other: Mapping[str, Any], kind: str = "both") -> float:
    """Median over the rounds of how many times the other's time a row took."""
    pairs = zip(row[kind]["values"], other[kind]["values"], strict=True)
    return statistics.median(mine / its for mine, its in pairs)


def cells(row: Mapping[str, Any], first: Mapping[str, Any] | None) -> list[str]:
    """One line of the table; the reason where the entrant was not timed."""
    if row["reason"] is not None:
        return [row["mechanism"], row["kernel"], f"– ({row['reason']})", *[""] * (len(HEADINGS) - 3)]
    both = row["both"]
    memory = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"
    return [
        row["mechanism"],
        row["kernel"],
        f"{row['forward']['median'] * 1e3:.3g}",
        f"{both['median'] * 1e3:.3g}",
        f"{both['min'] * 1e3:.3g} – {both['max'] * 1e3:.3g}",
        f"{row['both_flops_per_second'] / 1e12:.3g}",
        f"{row['both_of_peak']:.0%}",
        "–" if first is None else f"{ratio(row, first):.2f} ×",
        memory,
        f"{max(row['error'].values()):.0e}",
    ]


def first_timed(shape: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The entrant that the others are put beside."""
    return next((row for row in shape["entrants"] if row["reason"] is None), None)


def timed(shape: Mapping[str, Any], mechanism: str, kernels: tuple[str, ...]) -> Mapping[str, Any] | None:
    """The fastest of these kernels, forward and backward."""
    found = [row for row in shape["entrants"] if row["mechanism"] == mechanism and row["kernel"] in kernels]
    return min((row for row in found if row["reason"] is None), key=lambda row: row["both"]["median"], default=None)


def targets(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each target for each shape in which both sides were timed."""
    rows = []
    for shape in record["shapes"]:
        label, length = shape["shape"]["label"], shape["shape"]["length"]
        ours = timed(shape, "scale-invariant", ("triton",))
        flex = timed(shape, "scale-invariant", ("flex", "flex-formula"))
        flash, log_n = timed(shape, "plain", ("flash",)), timed(shape, "log-n", ("flash",))
        if ours and flex:
            rows.append(_at_least(f"{label}: ours beside FlexAttention", FASTER_THAN_FLEX, 1 / ratio(ours, flex)))
        if ours and flash and length >= FROM_LENGTH:
            rows.append(_at_most(f"{label}: ours beside plain flash attention", BESIDE_FLASH, ratio(ours, flash)))
        if log_n and flash:
            rows.append(_at_most(f"{label}: log-n beside plain", BESIDE_PLAIN, ratio(log_n, flash)))
    return rows


def _at_least(what: str, wanted: float, measured: float) -> dict[str, Any]:
    text = {"wanted": f"≥ {wanted:g} × as fast", "measured": f"{measured:.2f} ×"}
    return {"what": what, **text, "met": measured >= wanted}


def _at_most(what: str, wanted: float, measured: float) -> dict[str, Any]:
    text = {"wanted": f"≤ {wanted:g} × the time", "measured": f"{measured:.2f} ×"}
    return {"what": what, **text, "met": measured <= wanted}


def title(record: Mapping[str, Any]) -> str:
    hardware, settings = record["environment"]["hardware"], record["settings"]
    device = hardware["device"] if hardware["device"] != "CPU" else f"{hardware['cpu']}, {hardware['cores']} cores"
    dtype = settings["dtype"].removeprefix("torch.")
    return f"{device}, {dtype}, peak {record['peak_flops_per_second'] / 1e12:.3g} TFLOP/s"


def markdown(record: Mapping[str, Any]) -> str:
    """All of it as Markdown."""
    lines = [f"# anlit benchmark attention: {title(record)}", "", f"`{record['command']}`", ""]
    for shape in record["shapes"]:
        lines += [f"## {_heading(shape)}", "", _line(HEADINGS), _line(["---"] * len(HEADINGS))]
        lines += [_line(cells(row, first_timed(shape))) for row in shape["entrants"]] + [""]
    if record["targets"]:
        lines += ["## Targets", "", _line(("target", "wanted", "measured", "met")), _line(["---"] * 4)]
        lines += [_line((r["what"], r["wanted"], r["measured"], _met(r))) for r in record["targets"]] + [""]
    if record["left_out"]:
        lines += [f"Left out for time: {'; '.join(record['left_out'])}.", ""]
    return "\n".join(lines)


def show(record: Mapping[str, Any]) -> None:
    """Print the tables."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for shape in record["shapes"]:
        table = Table(title=_heading(shape), title_justify="left")
        for heading in HEADINGS:
            left = heading in ("mechanism", "kernel")
            table.add_column(heading, justify="left" if left else "right", no_wrap=left)
        for row in shape["entrants"]:
            if row["reason"] is None:
                table.add_row(*cells(row, first_timed(shape)))
        console.print(table)
        for row in shape["entrants"]:
            if row["reason"] is not None:
                console.print(f"not timed: {row['mechanism']}, {row['kernel']}: {row['reason']}", markup=False)
    if record["targets"]:
        aims = Table(title="Targets", title_justify="left")
        for heading in ("target", "wanted", "measured", "met"):
            aims.add_column(heading)
        for row in record["targets"]:
            aims.add_row(row["what"], row["wanted"], row["measured"], _met(row))
        console.print(aims)
    hardware = record["environment"]["hardware"]
    if (load := record["environment"]["load_before"]) > BUSY_LOAD * hardware["cores"]:
        console.print(f"The machine was busy before this began (load {load:.1f}): rely on the ratios alone.")


def _heading(shape: Mapping[str, Any]) -> str:
    sizes = shape["shape"]
    return f"{sizes['label']}, {sizes['batch']} × {sizes['heads']} heads"


def _line(values: Any) -> str:
    return f"| {' | '.join(value.replace('|', '¦') for value in values)} |"


def _met(row: Mapping[str, Any]) -> str:
    return "yes" if row["met"] else "no"
