"""The report of `anlit diagnose` on a model: raw numbers, a summary per layer, figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anlit.evaluation.diagnose.plot import draw, last_bin, reliable
from anlit.evaluation.record import provenance
from anlit.reporting.files import jsonable, write_json, write_text, writing
from anlit.reporting.table import NONE, TerminalTable, console, markdown_table
from anlit.reporting.text import literal, minus

COLUMNS = {
    "entropy": ("entropy (nats)", 2),
    "inverse_largest_weight": ("1/w_max", 1),
    "participation": ("Σw²", 4),
    "weight_on_first": ("first token", 3),
    "weight_latest_100": ("last 100", 3),
    "squared_average": ("‖Σwv‖ /‖v‖", 3),
    "orthogonal": ("√Σw²", 3),
}
DIGITS = 7
"""Significant digits of the raw numbers."""
PRINTED = [name for name in COLUMNS if name != "participation"]  # the table has its root, and must fit into 80 columns
DEFINITIONS = """\
Means over heads, with the smallest and the largest head in brackets, over queries at
positions {low:,} to {high:,} of their document (n).
Entropy is −Σw ln w in nats; *1/w_max* is about the number of keys that share the attention; *first token* is the weight
on the first token of the document, *last 100* that on the latest 100 tokens. *‖Σwv‖ /‖v‖* is the root mean square over
queries of the size of the attention average relative to its values (root mean square over visible keys), *√Σw²* what it
would be if values were orthogonal and equally long. In the figures, the visible part of a range [t, 10t) counts."""


def publish(folder: Path, label: str, record: dict[str, Any]) -> None:
    """Write diagnose.json, report.md and the figures into `folder`, and print the summary of the longest sequences.

    Raises:
        UserError: The folder cannot be written.
    """
    lengths = record["lengths"]
    longest = lengths[max(lengths)]
    copied = copying_told(record["copying"])
    with writing(folder):
        figures = draw(folder, label, longest)
    parts = [f"# Attention statistics\n\n{literal(label)}, document masking {'on' if record['masking'] else 'off'}"]
    for length, found in sorted(lengths.items(), reverse=True):
        low, high = last_bin(found)
        parts += [
            f"## Sequences of {length:,} tokens\n\n{found['tokens']:,} tokens read.",
            markdown_table(["layer", *(title for title, _ in COLUMNS.values())], rows(found)),
            DEFINITIONS.format(low=low, high=high),
        ]
    parts += [f"## Copying\n\n{line}" for line in copied]
    parts += [f"## Figures, for sequences of {max(lengths):,} tokens"]
    parts += [f"![{title}]({file.name})" for title, file in figures.items()]
    parts += ["## Where the numbers come from\n\n" + provenance(record)]
    with writing(folder):
        write_json(folder / "diagnose.json", jsonable(record, DIGITS))
        write_text(folder / "report.md", "\n\n".join(parts) + "\n")
    low, high = last_bin(longest)
    shown = [0, *(1 + list(COLUMNS).index(name) for name in PRINTED)]
    body = [[row[index].partition(" [")[0] for index in shown] for row in rows(longest)]
    head = ["layer", *(COLUMNS[name][0] for name in PRINTED)]
    print_report(f"{label}: n = {low:,} to {high:,}, means over heads", head, body, folder, copied)


def column(found: dict[str, Any], name: str) -> np.ndarray:
    """A statistic as (layers, heads, bins); with square roots for the two sizes of the average."""
    if name == "orthogonal":
        return np.sqrt(np.array(found["statistics"]["participation"]))
    values = np.array(found["statistics"][name])
    return np.sqrt(values) if name == "squared_average" else values


def rows(found: dict[str, Any]) -> list[list[str]]:
    """The summary: a row per layer, with `COLUMNS` after its number."""
    last = reliable(found) - 1
    columns = [(column(found, name), digits) for name, (_, digits) in COLUMNS.items()]
    return [
        [str(layer), *(cell(values[layer, :, last], digits) for values, digits in columns)]
        for layer in range(len(found["statistics"]["entropy"]))
    ]


def cell(heads: np.ndarray, digits: int) -> str:
    """`0.52 [0.31, 0.70]`: mean, smallest and largest."""
    heads = heads[np.isfinite(heads)]
    if not len(heads):
        return NONE
    mean, low, high = (f"{value:.{digits}f}" for value in (heads.mean(), heads.min(), heads.max()))
    return mean if low == high else f"{mean} [{low}, {high}]"


def copying_told(losses: dict[str, float]) -> list[str]:
    """Whether the model copies, as a sentence; nothing of a model too short for it."""
    if not losses:
        return []
    first, second = losses["first"], losses["second"]
    saved = minus(f"{first - second:.2f}")
    return [f"Random tokens cost {first:.2f} nats each, the same tokens once more {second:.2f}: a copy saves {saved}."]


def print_report(title: str, head: list[str], body: list[list[str]], folder: Path, lines: Sequence[str] = ()) -> None:
    """Print a table, with a line for each word of its head, then `lines` and where the report is."""
    screen = console()
    screen.print(TerminalTable(title, [name.replace(" ", "\n") for name in head], body))
    for line in lines:
        screen.print(line, markup=False, highlight=False)
    screen.print(f"Report: {folder / 'report.md'}", markup=False, highlight=False, soft_wrap=True)
