"""The page and the figure of attention over independent normal scores."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from anlit.configuration import attention_label
from anlit.evaluation.runner import Report
from anlit.reporting.figure import TEXT, legend_below, line_styles, panels
from anlit.reporting.table import Table, markdown_table

COLUMNS = {
    "entropy": ("entropy (nats)", ".2f"),
    "inverse_largest_weight": ("1/w_max", ".1f"),
    "participation": ("Σw²", ".3g"),
    "weight_latest_100": ("last 100", ".3f"),
}
PANELS = {
    "expected_total": "E Σ e^L in [t, 10t)",
    "weight": "share of the weights in [t, 10t)",
    "entropy": "entropy in [t, 10t) (nats)",
}


def report(record: dict[str, Any]) -> Report:
    """What to show of gaussian.json: tables for each n, the largest first, and the figure of the largest."""
    mechanisms = record["mechanisms"]
    lengths = sorted(next(iter(mechanisms.values())), key=int, reverse=True)
    head = [title for title, _ in COLUMNS.values()]
    parts = [
        "# Attention over independent normal scores",
        f"One query with n keys, {record['draws']:,} draws, seed {record['seed']}. Means ± standard errors. "
        "Where e^L has a heavy tail, as with a large a(t)·g(n), standard errors are too small.",
        *(f"n = {int(n):,}\n\n{markdown_table(['mechanism', *head], _rows(mechanisms, n))}" for n in lengths),
        "## Ranges of distances\n\n![ranges of distances](ranges.png)",
    ]
    rows = [[cell.partition(" ±")[0] for cell in row] for row in _rows(mechanisms, lengths[0])]
    title = f"Independent normal scores, n = {int(lengths[0]):,} keys"
    table = Table(title, ["mechanism", *(name.replace(" ", "\n") for name in head)], rows)
    return Report(table, parts, {"ranges.png": lambda: ranges_figure(mechanisms, lengths[0])})


def ranges_figure(mechanisms: dict[str, Any], n: str) -> Figure:
    """[SI]'s figures 1 and 2: the expected total weight in [t, 10t), and the entropy there, for n keys."""
    names = {name: "sliding window" if name == "SlidingWindow" else attention_label(name) for name in mechanisms}
    styles = line_styles(list(names.values()))
    figure, axes = panels(len(PANELS), len(PANELS), TEXT / len(PANELS), 2.0)
    for name, lengths in mechanisms.items():
        own, (colour, marker, dash) = lengths[n], styles[names[name]]
        begins = [t for t in (10**power for power in range(20)) if f"entropy_{t}_to_{10 * t}" in own]
        for ax, kind in zip(axes, PANELS, strict=True):
            means = np.array([own[f"{kind}_{t}_to_{10 * t}"]["mean"] for t in begins], dtype=float)
            ax.plot(begins, means, linestyle=dash, color=colour, linewidth=1.2, marker=marker, markersize=3.5,
                    label=names[name])  # fmt: skip
    for ax, (kind, title) in zip(axes, PANELS.items(), strict=True):
        ax.set_xscale("log")
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_title(title)
        ax.set_xlabel("t (tokens)")
        if kind == "expected_total":
            ax.set_yscale("log")
        else:
            ax.set_ylim(bottom=0)
    legend_below(figure, axes[0].get_lines(), 5, f"independent normal scores, a query with {int(n):,} keys")
    return figure


def _rows(mechanisms: dict[str, Any], n: str) -> list[list[str]]:
    return [
        [name, *(_cell(lengths[n][column], form) for column, (_, form) in COLUMNS.items())]
        for name, lengths in mechanisms.items()
    ]


def _cell(value: dict[str, float | None], form: str) -> str:
    error = f" ± {_number(value['standard_error'], form)}" if "standard_error" in value else ""
    return f"{_number(value['mean'], form)}{error}"


def _number(value: float | None, form: str) -> str:
    return f"{float('nan') if value is None else value:{form}}"
