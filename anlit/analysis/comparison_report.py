"""Writes a comparison as a page, its Markdown twin and JSON, and prints its table."""

from collections.abc import Callable, Iterable
from typing import Any

from anlit.analysis.comparison import Comparison, Result, record_runs
from anlit.reporting.files import write_json
from anlit.reporting.intervals import Interval, Summary, mean_sd
from anlit.reporting.page import listed, write_page
from anlit.reporting.table import NONE, Table, markdown_table
from anlit.reporting.table import console as terminal
from anlit.reporting.text import code, literal, minus, visible
from anlit.runs.folders import Run
from anlit.runs.groups import records

COLUMNS = (
    "seeds", "parameters", "validation loss", "bits per byte", "tokens", "seconds", "speed-up, tokens", "% of tokens",
    "time per token", "speed-up, wall-clock",
)  # fmt: skip
# What fits into a terminal of 80 columns.
PRINTED = ("validation loss", "speed-up, tokens", "time per token", "speed-up, wall-clock")
DEFINITION = """\
Validation loss is in nats per token at the end of training. *Speed-up, tokens* is the tokens at which
the baseline first has its own final loss over those at which the other first has it: linear between validation points,
not smoothed, never extrapolated, pair by pair on the seeds that both have. It is the geometric mean with its 95 %
interval; "k of n seeds" if a run never gets there. *% of tokens* is its inverse. Other values are mean ± standard
deviation over seeds. *Time per token* is that of training steps over the baseline's, taken in
turns in one process: the median over rounds with its 95 % interval. *Speed-up, wall-clock* is the speed-up in tokens
divided by it; its interval combines that of the time with the one over seeds, if there are several. *Seconds* are what
the runs took, including other work of the machine."""
TESTS = """\
Losses are compared by a t-test, paired where both have the same seeds (of initial weights and data order), else
Welch's; speed-ups, one per pair of seeds, by a t-test of their logarithm. *Holm* corrects p
for the number of rows. Called significant: p (Holm) below 0.05. Few seeds make wide intervals: read those first."""
LEAST_P = 0.05


def write(comparison: Comparison) -> None:
    """Writes report.html, report.md and convergence.json to the comparison's folder; the picture is there already."""
    write_json(comparison.output / "convergence.json", comparison.raw() | record_runs([comparison]))
    write_page(comparison.output, "report", paragraphs(comparison))


def paragraphs(comparison: Comparison) -> list[str]:
    """The paragraphs of a comparison's report in Markdown."""
    counted = [run for result in comparison.results for run in result.group.counted]
    return [
        "# Convergence",
        f"Baseline: **{literal(comparison.baseline.label)}**",
        "## Comparison",
        *section(comparison),
        "## Notes and warnings\n\n" + (listed(comparison.notes) or "None."),
        "## Runs\n\n" + runs_table(list(comparison.runs), comparison.label_of),
        "## Where the numbers come from\n\n" + provenance(counted, [f"compared with: {code(comparison.command)}"]),
    ]


def section(comparison: Comparison, explained: bool = False) -> list[str]:
    """A comparison in Markdown: findings, curves, losses, speed-ups, tests; their definitions unless `explained`."""
    rows = [[literal(_name(result, comparison)), *_cells(result)] for result in comparison.results]
    parts = [
        findings(comparison),
        f"![validation loss over tokens and time]({comparison.plot.name})",
        markdown_table(["configuration", *COLUMNS], rows),
        *([] if explained else [DEFINITION]),
    ]
    if any(result.loss or result.speedup.test for result in comparison.others):
        parts += [_tests(comparison), *([] if explained else [TESTS])]
    return parts


def findings(comparison: Comparison) -> str:
    """One sentence for each configuration: the difference of its loss, its speed-up, and how certain they are."""
    lines = []
    for result in comparison.others:
        n = len(result.group.counted)
        told = f"**{literal(result.label)}** ends at {mean_sd(result.final_loss, 4)} nats per token (n = {n})"
        if result.loss is not None:
            verdict = "lower" if result.loss.difference < 0 else "higher"
            sure = "significant" if result.p_holm is not None and result.p_holm < LEAST_P else "not significant"
            told += f", {abs(result.loss.difference):.4f} {verdict} than the baseline ({sure}, {_p(result.p_holm)})"
        told += f"; speed-up {result.speedup.words} in tokens"
        if result.wall_clock is not None and result.wall_clock.speedup is not None:
            told += f", {interval(result.wall_clock.speedup)} in wall-clock"
        lines.append(f"- {told}.")
    return "\n".join(lines) or "- There is only the baseline."


def show(comparison: Comparison) -> None:
    """Prints the main columns, the notes and the path of the plot."""
    console = terminal()
    shown = [COLUMNS.index(name) for name in PRINTED]
    head = [name.replace(", ", ",\n").replace(" per ", "\nper ").replace(" loss", "\nloss") for name in PRINTED]
    rows = []
    for result in comparison.results:
        cells = _cells(result)
        rows.append([_name(result, comparison), *(cells[i].replace(" (", "\n(") for i in shown)])
    title = f"Convergence against {comparison.baseline.label}"
    console.print(Table(title, ["configuration", *head], rows))
    for note in comparison.notes:
        console.print(visible(f"note: {note}"))
    paths = visible(f"Plot: {comparison.plot}, page: {comparison.output / 'report.html'}")
    console.print(paths, soft_wrap=True)


def interval(estimate: Interval) -> str:
    """`1.08 (1.06 … 1.11)`: an estimate with its 95 % interval."""
    return f"{estimate.median:.2f} ({estimate.low:.2f} … {estimate.high:.2f})"


def _cells(result: Result) -> list[str]:
    group, speedup, timed = result.group, result.speedup, result.wall_clock
    faster = timed.speedup if timed else None
    return [
        str(len(group.counted)),
        f"{group.counted[0].parameters:,}" if group.counted[0].parameters else NONE,
        mean_sd(result.final_loss, 4),
        mean_sd(result.bits_per_byte, 4),
        mean_sd(Summary((result.tokens.mean,)), 0),
        mean_sd(result.seconds, 0),
        speedup.words,
        NONE if speedup.mean is None else f"{100 / speedup.mean:.0f} %",
        interval(timed.time) if timed else NONE,
        NONE if faster is None else ("≥ " if speedup.bound else "") + interval(faster),
    ]


def _name(result: Result, comparison: Comparison) -> str:
    marks = ["baseline"] * (result is comparison.baseline) + ["unfinished"] * result.group.unfinished
    return f"{result.label} ({', '.join(marks)})" if marks else result.label


def _tests(comparison: Comparison) -> str:
    rows = []
    for result in comparison.others:
        test, cells = result.loss, [NONE] * 6
        if test is not None:
            n = str(test.n[0]) if test.method.startswith("paired") else f"{test.n[0]}, {test.n[1]}"
            span = minus(f"{test.low:+.4f} … {test.high:+.4f}")
            cells = [n, minus(f"{test.difference:+.4f}"), span, test.method, _p(test.p), _p(result.p_holm)]
        t = result.speedup.test
        speed = f"{t.difference:.2f} ({t.low:.2f} … {t.high:.2f}), {_p(t.p)}" if t else NONE
        rows.append([literal(result.label), *cells, speed])
    head = ["against the baseline", "n", "difference in loss", "95 % interval", "test", "p", "p, Holm"]
    return markdown_table([*head, "speed-up, tokens (95 %)"], rows)


def runs_table(runs: list[Run], label_of: Callable[[Run], str | None]) -> str:
    """Every run with its seed, last loss, state, commit and folder; runs that are not counted are marked."""
    rows = []
    for run in runs:
        loss = f"{run.curve.loss[-1]:.4f}" if len(run.curve) else NONE
        error = str(run.record.get("error") or "").splitlines()
        state = f"{run.state}: {error[0]}" if error else run.state
        seed = NONE if run.seed is None else str(run.seed)
        counted = label_of(run) or f"(not counted) {run.architecture}, {run.attention}"
        shown = [literal(text) for text in (state, run.commit or NONE)]
        rows.append([literal(counted), seed, loss, *shown, code(str(run.folder))])
    return markdown_table(
        ["configuration", "seed", "validation loss", "status", "commit", "folder"], rows, left=(0, 3, 4, 5)
    )


def provenance(counted: list[Run], first: list[str]) -> str:
    """Commands, commits, hardware, versions and data fingerprints behind the counted runs, as a list."""
    launches = [launch for run in counted for launch in run.launches]
    commands = dict.fromkeys(str(launch["command"]) for launch in launches if launch.get("command"))
    lines = [*(f"- {line}" for line in first), *(f"- trained with: {code(command)}" for command in commands)]
    lines.append("- commits: " + _listed(run.commit for run in counted))
    lines.append("- hardware: " + _listed(run.hardware for run in counted))
    for name in ("versions", "data"):
        for record in records(tuple(counted), name):
            lines.append(f"- {name}: " + literal(_pairs(record)))
    return "\n".join(lines)


def _p(value: float | None) -> str:
    if value is None:
        return NONE
    return "p < 0.0001" if value < 1e-4 else f"p = {value:.4f}" if value < 0.01 else f"p = {value:.2f}"


def _pairs(record: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in record.items() if not isinstance(value, dict))


def _listed(values: Iterable[str | None]) -> str:
    return literal(", ".join(dict.fromkeys(value or "not recorded" for value in values)))
