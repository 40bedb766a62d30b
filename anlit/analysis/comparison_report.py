"""Writes a comparison as a page, its Markdown twin and JSON, and prints its table."""

from collections.abc import Callable, Sequence

from anlit.analysis.comparison import Comparison, Result, record_runs
from anlit.analysis.statistics import Interval, Summary, mean_sd
from anlit.reporting.files import write_json
from anlit.reporting.page import listed, write_page
from anlit.reporting.table import NONE, Table, markdown_table
from anlit.reporting.table import console as terminal
from anlit.reporting.text import code, literal, minus, without_control_codes
from anlit.runs.folders import Run
from anlit.runs.groups import records

PRINTED = {name: name.replace(", ", ",\n") if "," in name else name.replace(" ", "\n", 1)
           for name in ("validation loss", "speed-up, tokens", "time per token", "speed-up, wall-clock")}  # fmt: skip
"""The columns that fit into a terminal of 80 characters, with their headings there."""
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
    counted = [run for result in comparison.results for run in result.group.counted]
    write_json(comparison.output / "convergence.json", comparison.raw() | record_runs([comparison]))
    write_page(comparison.output, "report", [
        "# Convergence", f"Baseline: **{literal(comparison.baseline.label)}**", "## Comparison", *section(comparison),
        "## Notes and warnings", listed(comparison.notes) or "None.",
        *sources(comparison.runs, comparison.label_of, counted, [f"compared with: {code(comparison.command)}"]),
    ])  # fmt: skip


def section(comparison: Comparison, explained: bool = False) -> list[str]:
    """A comparison in Markdown: findings, curves, losses, speed-ups, tests; their definitions unless `explained`."""
    rows = [[literal(_name(result, comparison)), *_cells(result).values()] for result in comparison.results]
    tested = any(result.loss or result.speedup.test for result in comparison.others)
    return [
        "\n".join(f"- {_finding(result)}." for result in comparison.others) or "- There is only the baseline.",
        f"![validation loss over tokens and time]({comparison.plot.name})",
        markdown_table(["configuration", *_cells(comparison.baseline)], rows),
        "" if explained else DEFINITION,
        _tests(comparison) if tested else "",
        TESTS if tested and not explained else "",
    ]


def show(comparison: Comparison) -> None:
    """Prints the main columns, the notes and the path of the plot."""
    rows = [[_name(result, comparison), *(_cells(result)[name].replace(" (", "\n(") for name in PRINTED)]
            for result in comparison.results]  # fmt: skip
    console, head = terminal(), ["configuration", *PRINTED.values()]
    console.print(Table(f"Convergence against {comparison.baseline.label}", head, rows))
    for note in comparison.notes:
        console.print(without_control_codes(f"note: {note}"))
    paths = without_control_codes(f"Plot: {comparison.plot}, page: {comparison.output / 'report.html'}")
    console.print(paths, soft_wrap=True)


def _finding(result: Result) -> str:
    """The difference of a configuration's loss, its speed-up, and how certain they are."""
    n = len(result.group.counted)
    words = f"**{literal(result.label)}** ends at {mean_sd(result.final_loss, 4)} nats per token (n = {n})"
    if result.loss is not None:
        verdict = "lower" if result.loss.difference < 0 else "higher"
        sure = "significant" if result.p_holm is not None and result.p_holm < LEAST_P else "not significant"
        words += f", {abs(result.loss.difference):.4f} {verdict} than the baseline ({sure}, {_p(result.p_holm)})"
    wall_clock = f", {_interval(result.wall_clock)} in wall-clock" if result.wall_clock else ""
    return f"{words}; speed-up {result.speedup.words} in tokens{wall_clock}"


def _cells(result: Result) -> dict[str, str]:
    """The values of a configuration, by the columns of the table."""
    group, speedup, summaries, faster = result.group, result.speedup, result.summaries, result.wall_clock
    return {
        "seeds": str(len(group.counted)),
        "parameters": f"{group.counted[0].parameters:,}" if group.counted[0].parameters else NONE,
        "validation loss": mean_sd(result.final_loss, 4),
        "bits per byte": mean_sd(summaries["bits_per_byte"], 4),
        "tokens": mean_sd(Summary([summaries["tokens"].mean]), 0),
        "seconds": mean_sd(summaries["seconds"], 0),
        "speed-up, tokens": speedup.words,
        "% of tokens": NONE if speedup.mean is None else f"{100 / speedup.mean:.0f} %",
        "time per token": _interval(result.time) if result.time else NONE,
        "speed-up, wall-clock": NONE if faster is None else ("≥ " if speedup.bound else "") + _interval(faster),
    }


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
        speed = f"{_interval(Interval(t.difference, t.low, t.high))}, {_p(t.p)}" if t else NONE
        rows.append([literal(result.label), *cells, speed])
    head = ["against the baseline", "n", "difference in loss", "95 % interval", "test", "p", "p, Holm"]
    return markdown_table([*head, "speed-up, tokens (95 %)"], rows)


def sources(
    runs: Sequence[Run], label_of: Callable[[Run], str | None], counted: Sequence[Run], made: list[str]
) -> list[str]:
    """The end of a report: a table of `runs`, and what made the numbers of the `counted` ones, after the lines `made`.

    Runs without a label are marked as not counted.
    """
    rows, lines = [], [*made]
    for run in runs:
        loss = f"{run.final_loss:.4f}" if len(run.curve) else NONE
        error = str(run.record.get("error") or "").partition("\n")[0]
        seed = NONE if run.seed is None else str(run.seed)
        counts = label_of(run) or f"(not counted) {run.architecture}, {run.attention}"
        cells = (counts, seed, loss, f"{run.state}: {error}" if error else run.state, run.commit or NONE)
        rows.append([*map(literal, cells), code(str(run.folder))])
    head = ["configuration", "seed", "validation loss", "status", "commit", "folder"]
    commands = [str(launch["command"]) for run in counted for launch in run.launches if launch.get("command")]
    lines += [f"trained with: {code(command)}" for command in dict.fromkeys(commands)]
    for name, values in (("commits", [run.commit for run in counted]), ("hardware", [run.hardware for run in counted])):
        lines.append(f"{name}: " + literal(", ".join(dict.fromkeys(value or "not recorded" for value in values))))
    for name in ("versions", "data"):
        for record in records(counted, name):
            pairs = (f"{key} {value}" for key, value in record.items() if not isinstance(value, dict))
            lines.append(f"{name}: " + literal(", ".join(pairs)))
    table = markdown_table(head, rows, left=(0, 3, 4, 5))
    return ["## Runs", table, "## Where the numbers come from", "\n".join(f"- {line}" for line in lines)]


def _interval(estimate: Interval) -> str:
    """`1.08 (1.06 … 1.11)`: an estimate with its 95 % interval."""
    return f"{estimate.median:.2f} ({estimate.low:.2f} … {estimate.high:.2f})"


def _p(value: float | None) -> str:
    if value is None:
        return NONE
    return "p < 0.0001" if value < 1e-4 else f"p = {value:.4f}" if value < 0.01 else f"p = {value:.2f}"
