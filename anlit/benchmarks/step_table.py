"""The results of `anlit benchmark step` as a table in the terminal, as Markdown, and as a bar plot."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

from anlit.benchmarks.data_table import BUSY_LOAD
from anlit.benchmarks.step_report import PEER_NAMES, mode

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from anlit.analysis.plots import BASELINE_COLOUR, COLOURS

WIDTH = 170
"""Where the output is no terminal."""
HEADINGS = ("variant", "step, ms", "quartiles", "tokens/s", "MFU", "beside GPT+ (95 %)", "memory, MB", "forward, ms",
            "inference, ms")  # fmt: skip
TARGET_HEADINGS = ("target", "wanted", "measured", "met")
EAGER, COMPILED = COLOURS[5], COLOURS[0]


def title(record: Mapping[str, Any]) -> str:
    hardware, size = record["environment"]["hardware"], record["settings"]["size"]
    device = hardware["device"] if hardware["device"] != "cpu" else f"{hardware['cpu']}, {record['threads']} threads"
    shape = f"d {size['d_model']}, L {size['n_layers']}, T {size['length']}, B {size['batch']}, V {size['vocab_size']}"
    peak = f"peak {record['peak_flops_per_second'] / 1e12:.3g} TFLOP/s"
    return f"{size['label']} ({shape}, {size['dtype']}) on {device}, {peak}"


def cells(row: Mapping[str, Any]) -> list[str]:
    """One line of the table; the reason where the variant was not timed."""
    if row["reason"] is not None:
        return [_name(row), f"– ({row['reason']})", *[""] * (len(HEADINGS) - 2)]
    spread, step = row["spread"], row["spread"]["train"]
    beside = row["beside_base"].get("train")
    return [
        _name(row),
        _milliseconds(step["median"]),
        " – ".join(map(_milliseconds, step["quartiles"])),
        f"{row['tokens_per_second']:.4g}",
        f"{row['mfu']:.1%}",
        "–" if beside is None else f"{beside['median']:.3f} ({beside['low']:.3f} – {beside['high']:.3f})",
        "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}",
        *(_milliseconds(spread[kind]["median"]) if kind in spread else "–" for kind in ("forward", "infer")),
    ]


def markdown(record: Mapping[str, Any]) -> str:
    """All of it as Markdown."""
    lines = [f"# anlit benchmark step: {title(record)}", "", f"`{record['command']}`, {record['rounds']} rounds", ""]
    lines += _lines(HEADINGS, map(cells, record["rows"]))
    if record["targets"]:
        lines += ["", "## Targets", "", *_lines(TARGET_HEADINGS, map(_target, record["targets"]))]
    return "\n".join(lines) + "\n"


def show(record: Mapping[str, Any]) -> None:
    """Print it."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    rows = record["rows"]
    print_table(console, title(record), HEADINGS, [cells(row) for row in rows if row["reason"] is None])
    for row in rows:
        if row["reason"] is not None:
            console.print(f"not timed: {_name(row)}: {row['reason']}", markup=False)
    if record["targets"]:
        print_table(console, "Targets", TARGET_HEADINGS, map(_target, record["targets"]))
    hardware = record["environment"]["hardware"]
    if (load := record["environment"]["load_before"]) > BUSY_LOAD * hardware["cores"]:
        console.print(f"The machine was busy before this began (load {load:.1f}): rely on the ratios alone.")


def print_table(console: Console, heading: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """A table whose first column stands left."""
    table = Table(title=heading, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for line in lines:
        table.add_row(*line)
    console.print(table)


def plot(record: Mapping[str, Any], path: Path) -> None:
    """Bars of the step's time and of its memory, as PNG; whiskers are quartiles. Nothing where nothing was timed."""
    rows = [row for row in record["rows"] if row["reason"] is None]
    if not rows:
        return
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11.5, 0.36 * len(rows) + 1.9), sharey=True, layout="constrained", width_ratios=(3, 2)
        )
        colours = [EAGER if mode(row) == "eager" else COMPILED for row in rows]
        places = range(len(rows))
        medians = [1e3 * row["spread"]["train"]["median"] for row in rows]
        quartiles = [[1e3 * value for value in row["spread"]["train"]["quartiles"]] for row in rows]
        whiskers = [[m - low for m, (low, _) in zip(medians, quartiles, strict=True)],
                    [high - m for m, (_, high) in zip(medians, quartiles, strict=True)]]  # fmt: skip
        left.barh(places, medians, color=colours, xerr=whiskers, error_kw={"ecolor": BASELINE_COLOUR, "capsize": 2.5})
        left.set_yticks(places, [_name(row) for row in rows])
        left.invert_yaxis()
        left.set_xlabel("training step (ms), whiskers are quartiles")
        _write_beside(left, [f"{value:.3g} ms, MFU {row['mfu']:.0%}" for value, row in zip(medians, rows, strict=True)],
                      [high for _, high in quartiles])  # fmt: skip
        memory = [(row["peak_bytes"] or 0) / 1e9 for row in rows]
        right.barh(places, memory, color=colours)
        right.set_xlabel("peak memory of the step (GB)")
        _write_beside(right, [f"{value:.3g}" if value else "–" for value in memory], memory)
        figure.suptitle(title(record), x=0.01, ha="left", fontsize=10)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _write_beside(ax: Axes, texts: Sequence[str], ends: Sequence[float]) -> None:
    ax.set_xlim(0, max(ends) * 1.45 or 1)
    for place, (text, end) in enumerate(zip(texts, ends, strict=True)):
        ax.annotate(text, (end, place), (5, 0), textcoords="offset points", va="center", fontsize=8.5)


def _name(row: Mapping[str, Any]) -> str:
    model = row["model"]
    return str(row["label"].replace(model, PEER_NAMES.get(model, "GPT+" if model == "GPT" else model), 1))


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def _target(row: Mapping[str, Any]) -> list[str]:
    return [row["what"], row["wanted"], row["measured"], "yes" if row["met"] else "no"]


def _lines(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(value.replace('|', '¦') for value in line)} |"
            for line in (headings, ["---"] * len(headings), *rows)]  # fmt: skip
