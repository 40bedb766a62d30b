"""Writes a comparison as Markdown and JSON and prints its table."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from anlit.analysis.groups import records
from anlit.analysis.results import Report, Result
from anlit.analysis.speedup import Summary

NONE = "–"
COLUMNS = (
    "architecture", "attention", "seeds", "parameters", "validation loss", "bits per byte", "tokens",
    "seconds", "speed-up, tokens", "% of tokens", "speed-up, wall-clock",
)  # fmt: skip
# What fits into a terminal of 80 columns.
PRINTED = ("seeds", "validation loss", "speed-up, tokens", "% of tokens", "speed-up, wall-clock")
DEFINITION = """\
Validation loss is in nats per token at the end of training. *Speed-up* is the tokens (or seconds of
training) that the baseline needs for its final loss, {target:.4f}, over those needed to reach the same
loss: linear between validation points, first crossing, never extrapolated; *% of tokens* is its
inverse. Values are mean ± standard deviation over seeds. A speed-up whose seeds did not all get there
has no mean. *Averaged* is the mean over the losses that the baseline has at these shares of its tokens."""


def write(report: Report) -> None:
    """Writes report.md and convergence.json to the report's folder."""
    report.json.write_text(json.dumps(report.raw(), indent=1, ensure_ascii=False, allow_nan=False), encoding="utf-8")
    report.markdown.write_text(markdown(report), encoding="utf-8")


def markdown(report: Report) -> str:
    parts = [
        "# Convergence",
        f"Baseline: **{report.baseline.label}**\n\n![loss over tokens and time]({report.plot.name})",
        _table(["configuration", *COLUMNS], [[_name(r, report), *_cells(r)] for r in report.results]),
        DEFINITION.format(target=report.baseline.mean.loss[-1]),
        _fractions(report),
        "## Notes and warnings\n\n" + ("\n".join(f"- {note}" for note in report.notes) or "None."),
        "## Runs\n\n" + _runs(report),
        "## Where the numbers come from\n\n" + _provenance(report),
    ]
    return "\n\n".join(parts) + "\n"


def show(report: Report, console: Console | None = None) -> None:
    """Prints the main columns, the notes and the path of the plot."""
    console = console or Console()
    table = Table(title=f"Convergence against {report.baseline.label}", title_justify="left")
    shown = [COLUMNS.index(name) for name in PRINTED]
    table.add_column("configuration", overflow="fold")
    for name in PRINTED:
        table.add_column(name.replace(", ", ",\n").replace("% of ", "% of\n"), justify="right", no_wrap=True)
    for result in report.results:
        cells = _cells(result)
        table.add_row(_name(result, report), *(cells[i] for i in shown))
    console.print(table)
    for note in report.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    console.print(f"Plot: {report.plot}", markup=False, highlight=False, soft_wrap=True)


def spread(summary: Summary, digits: int) -> str:
    """`3.2101 ± 0.0042`, without the ± for one seed; – without a mean."""
    if summary.mean is None:
        return NONE
    sd = f" ± {summary.sd:,.{digits}f}" if summary.sd is not None else ""
    return f"{summary.mean:,.{digits}f}{sd}"


def speedup(summary: Summary, bound: bool = False) -> str:
    """`1.40 ± 0.03`, `not reached`, or how many of the seeds reached the loss."""
    if summary.mean is not None:
        return ("≥ " if bound else "") + spread(summary, 2)
    return f"{summary.reached} of {len(summary.values)} seeds" if summary.reached else "not reached"


def _cells(result: Result) -> list[str]:
    group, found = result.group, result.speedup
    timed = result.seconds.mean is not None
    share = found.tokens_share
    return [
        group.architecture,
        group.attention,
        str(len(group.counted)),
        f"{group.counted[0].parameters:,}" if group.counted[0].parameters else NONE,
        spread(result.final_loss, 4),
        spread(result.bits_per_byte, 4),
        spread(Summary((result.tokens.mean,)), 0),
        spread(result.seconds, 0),
        speedup(found.tokens, found.bound),
        NONE if share is None else f"{share:.0f} %",
        speedup(found.seconds, found.bound) if timed else NONE,
    ]


def _name(result: Result, report: Report) -> str:
    marks = ["baseline"] * (result is report.baseline) + ["unfinished"] * result.group.unfinished
    return f"{result.label} ({', '.join(marks)})" if marks else result.label


def _fractions(report: Report) -> str:
    fractions = list(report.baseline.speedup.by_fraction)
    rows = []
    for result in report.results:
        found = result.speedup
        averages = [
            found.averaged_tokens,
            *([found.averaged_seconds] if result.seconds.mean is not None else []),
        ]
        cells = [speedup(value) for value in (*found.by_fraction.values(), *averages)]
        rows.append([result.label, *cells, *[NONE] * (2 - len(averages))])
    head = ["speed-up, tokens", *(f"{100 * f:.0f} %" for f in fractions), "averaged", "averaged, wall-clock"]
    return _table(head, rows)


def _runs(report: Report) -> str:
    rows = []
    for run in report.runs:
        loss = f"{run.curve.loss[-1]:.4f}" if len(run.curve) else NONE
        error = str(run.record.get("error") or "").splitlines()
        state = f"{run.state}: {error[0]}" if error else run.state
        seed = NONE if run.seed is None else str(run.seed)
        counted = report.label_of(run) or f"(not counted) {run.architecture}, {run.attention}"
        rows.append([counted, seed, loss, state, run.commit or NONE, f"`{run.folder}`"])
    return _table(["configuration", "seed", "validation loss", "status", "commit", "folder"], rows)


def _provenance(report: Report) -> str:
    counted = tuple(run for result in report.results for run in result.group.counted)
    commands = dict.fromkeys(str(run.record["command"]) for run in counted if run.record.get("command"))
    lines = [f"- compared with: `{report.command}`"]
    lines += [f"- trained with: `{command}`" for command in commands]
    lines.append("- commits: " + _listed(run.commit for run in counted))
    lines.append("- hardware: " + _listed(run.hardware for run in counted))
    for name in ("versions", "data"):
        for record in records(counted, name):
            lines.append(f"- {name}: " + ", ".join(f"{k} {v}" for k, v in record.items() if not isinstance(v, dict)))
    return "\n".join(lines)


def _listed(values: object) -> str:
    return ", ".join(dict.fromkeys(str(value or "not recorded") for value in values))  # type: ignore[attr-defined]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
