"""A comparison as a section of a page, and as a table in the terminal."""

from collections.abc import Callable, Sequence
from typing import Any

from anlit.compare.comparison import Comparison, Result
from anlit.compare.statistics import SpeedUp, Summary, Test, mean_sd, partial_reach
from anlit.reporting.table import NONE, Table, markdown_table
from anlit.reporting.table import console as terminal
from anlit.reporting.text import code, literal, minus, without_control_codes
from anlit.runs.folders import Run
from anlit.runs.groups import records
from anlit.runs.measure import NATS_PER_TOKEN

NOT_PRINTED = ("seeds", "parameters", "tokens", "text", "seconds", "% of tokens", "% of text")
"""The columns for which a terminal of 80 characters has no room."""
SIGNIFICANT = 0.05
"""p after Holm's correction below which a difference is called significant."""
DEFINITION = """\
Losses are in nats per token at the end of training, and values mean ± standard deviation over
seeds. *Speed-up, tokens* is the tokens at which the baseline first has its own final loss over
those at which the other first has it, never smoothed or extrapolated: the geometric mean over the
seeds that both have, or "k of n seeds" if a run never gets there. "≥" marks a bound: a run was
there at its first validation. *% of tokens* is its inverse. *Time per token* is that of training
steps in turns in one process over the baseline's; *speed-up, wall-clock* is the speed-up in tokens
divided by it. *Seconds* of the runs include other work of the machine. Intervals are of 95 %, each
for itself. *Holm* corrects p, and no interval, for the number of configurations; significant is
below 0.05. Few seeds make wide intervals: read those first."""
"""What the columns mean."""


ACROSS_TOKENIZERS = """\
Tokenizers differ, so losses are in bits per byte: nats per token at the end of training / ln 2 /
bytes per token of the validation split. *Text* is the training text in bytes: tokens × bytes per
token of the training split. Values are mean ± standard deviation over seeds. *Speed-up, text* is
the text after which the baseline first has its own final loss over that after which the other first
has it, never smoothed or extrapolated: the geometric mean over the seeds that both have, or "k of n
seeds" if a run never gets there. "≥" marks a bound: a run was there at its first validation. *% of
text* is its inverse. *Time per byte* is that of training steps in turns in one process over the
baseline's; *speed-up, wall-clock* is the speed-up in text divided by it. *Seconds* of the runs
include other work of the machine. Intervals are of 95 %, each for itself. *Holm* corrects p, and no
interval, for the number of configurations; significant is below 0.05. There is a test, and a
speed-up, only if both validate on all of the same text. Few seeds make wide intervals: read those
first."""
"""What the columns mean if tokenizers differ."""


def section(comparison: Comparison, explained: bool = False) -> list[str]:
    """A comparison in Markdown: findings with tests, curves, losses, speed-ups.

    The definitions follow, unless they are `explained` before.
    """
    findings = [f"- {_finding(result)}." for result in comparison.results[1:]]
    length = comparison.measure.short_length
    axes = f"{length} and time" if comparison.steps else length
    definition = DEFINITION if comparison.measure is NATS_PER_TOKEN else ACROSS_TOKENIZERS
    rows = []
    for result in comparison.results:
        rows.append([literal(_name(result, comparison)), *_cells(result).values()])
    return [
        "\n".join(findings) or "- There is only the baseline.",
        f"![validation loss over {axes}]({comparison.plot.name})",
        markdown_table(["configuration", *_cells(comparison.baseline)], rows),
        "" if explained else definition,
    ]


def show(comparison: Comparison) -> None:
    """Print the main columns, the notes and the path of the plot."""
    columns = _cells(comparison.baseline)
    shown = [column for column in columns if column not in NOT_PRINTED]
    if comparison.measure is NATS_PER_TOKEN:
        shown.remove("bits per byte")
    rows = []
    for result in comparison.results:
        cells = _cells(result)
        printed = [cells[column].replace(" (", "\n(") for column in shown]
        rows.append([_name(result, comparison), *printed])
    head = ["configuration", *(column.replace(" ", "\n", 1) for column in shown)]
    console = terminal()
    console.print(Table(f"Convergence against {comparison.baseline.label}", head, rows))
    for line in explain_marks(rows):
        console.print(line)
    if any(result.speedup.is_single for result in comparison.results[1:]):
        console.print("a speed-up without an interval: one seed, which chance alone may explain")
    for note in comparison.notes:
        console.print(without_control_codes(f"note: {note}"))
    paths = f"Plot: {comparison.plot}, page: {comparison.output / 'report.html'}"
    console.print(without_control_codes(paths), soft_wrap=True)


def explain_marks(rows: Sequence[Sequence[str]]) -> list[str]:
    """What ± and the intervals in the cells of a printed table mean; [] if it has none."""
    cells = "".join(map("".join, rows))
    meanings = []
    if "±" in cells:
        meanings.append("±: standard deviation over seeds")
    if " … " in cells:
        meanings.append("in brackets: 95 % interval")
    return ["; ".join(meanings)] if meanings else []


def _finding(result: Result) -> str:
    """The difference of a configuration's loss, its speed-up, and how certain they are."""
    measure = result.group.measure
    loss = mean_sd(result.final_loss, 4)
    verb = "is so far" if result.group.unfinished else "ends"
    text = f"**{literal(result.label)}** "
    if result.final_loss.mean:
        text += f"{verb} at {loss} {measure.loss}"
    else:
        text += f"has a loss on {loss} only"
    if result.loss is not None and result.p_holm is not None:
        text += f", {_test_in_words(result.loss, result.p_holm)}"
    elif result.speedup.is_single:
        text += " on one seed, which tests nothing"
    speedup = f"speed-up {result.speedup.words} in {measure.short_length}"
    text += f"; {partial_reach(result.speedup) or speedup}"
    if result.wall_clock:
        text += f", {_wall_clock(result)} in wall-clock"
    return text


def _test_in_words(test: Test, p_holm: float) -> str:
    verdict = "significant" if p_holm < SIGNIFICANT else "not significant"
    difference = minus(f"{test.difference:+.4f} ({test.low:+.4f} … {test.high:+.4f})")
    n = " and ".join(map(str, dict.fromkeys(test.n)))
    numbers = f"n = {n}, {_p_in_words(test.p)}, Holm {_p_in_words(p_holm)}"
    return f"{difference} from the baseline: {verdict} by the {test.method}, {numbers}"


def _p_in_words(p: float) -> str:
    if p < 1e-4:
        return "p < 0.0001"
    return f"p = {p:.4f}" if p < 0.01 else f"p = {p:.2f}"


def _wall_clock(result: Result) -> str:
    bound = "≥ " if result.speedup.bound else ""
    return f"{bound}{result.wall_clock}{result.speedup.pairs}"


def _cells(result: Result) -> dict[str, str]:
    """The values of a configuration, by the columns of the table."""
    parameters = result.group.counted[0].parameters
    speedup = result.speedup
    summaries = result.summaries
    measure = result.group.measure
    length = measure.short_length
    cells = {
        "seeds": _seeds_in_words(result),
        "parameters": f"{parameters:,}" if parameters else NONE,
    }
    if measure is NATS_PER_TOKEN:
        cells["validation loss"] = mean_sd(result.final_loss, 4)
        cells["bits per byte"] = mean_sd(summaries["bits_per_byte"], 4)
    else:
        cells["bits per byte"] = mean_sd(result.final_loss, 4)
        lengths = [float(measure.curve_of(run).tokens[-1]) for run in result.group.counted]
        cells["text"] = f"{Summary(lengths).mean:,.0f}"
    return cells | {
        "tokens": mean_sd(Summary([summaries["tokens"].mean]), 0),
        "seconds": mean_sd(summaries["seconds"], 0),
        f"speed-up, {length}": speedup.words,
        f"% of {length}": _share(speedup),
        f"time per {measure.unit}": str(result.time or NONE),
        "speed-up, wall-clock": _wall_clock(result) if result.wall_clock else NONE,
    }


def _share(speedup: SpeedUp) -> str:
    """The inverse of a speed-up, `71 %`; `≤ 71 %` of a bound."""
    if speedup.mean is None:
        return NONE
    bound = "≤ " if speedup.bound else ""
    return f"{bound}{100 / speedup.mean:.0f} %"


def _seeds_in_words(result: Result) -> str:
    """`2 of 3 (1 paired)`: counted seeds. All if some are lost, pairs if runs are left out."""
    text = str(len(result.group.counted))
    if result.group.lost:
        text += f" of {len(result.final_loss.values)}"
    if result.speedup.left_out:
        text += f" ({len(result.speedup.values)} paired)"
    return text


def _name(result: Result, comparison: Comparison) -> str:
    remarks = []
    if result is comparison.baseline:
        remarks.append("baseline")
    if result.group.unfinished:
        remarks.append("unfinished")
    return f"{result.label} ({', '.join(remarks)})" if remarks else result.label


def sources(
    runs: Sequence[Run],
    label_of: Callable[[Run], str | None],
    counted: Sequence[Run],
    commands: list[str],
) -> list[str]:
    """The end of a report: a table of `runs`, and where the numbers of `counted` runs come from.

    Args:
        label_of: The label of a run's group. None for a run that is not counted.
        commands: Lines about the commands that made the report.
    """
    rows = [_run_row(run, label_of(run)) for run in runs]
    head = ["configuration", "seed", "validation loss", "status", "commit", "folder"]
    lines = [*commands, *_training_commands(counted), *_facts(counted)]
    return [
        "## Runs",
        markdown_table(head, rows, left=(0, 3, 4, 5)),
        "## Where the numbers come from",
        "\n".join(f"- {line}" for line in lines),
    ]


def _run_row(run: Run, label: str | None) -> list[str]:
    error = str(run.record.get("error") or "").partition("\n")[0]
    cells = [
        label or f"(not counted) {run.architecture}, {run.attention}",
        NONE if run.seed is None else str(run.seed),
        f"{run.final_loss:.4f}" if len(run.curve) else NONE,
        f"{run.state}: {error}" if error else run.state,
        run.commit or NONE,
    ]
    return [*map(literal, cells), code(str(run.folder))]


def _training_commands(runs: Sequence[Run]) -> list[str]:
    """A line for each distinct command that the runs were trained with."""
    lines: dict[str, None] = {}
    for run in runs:
        for launch in run.launches:
            if launch.get("command"):
                lines[f"trained with: {code(str(launch['command']))}"] = None
    return list(lines)


def _facts(runs: Sequence[Run]) -> list[str]:
    """Lines on commits, hardware, versions and data of the runs."""
    lines = [
        _fact("commits", [run.commit for run in runs]),
        _fact("hardware", [run.hardware for run in runs]),
    ]
    for name in ("versions", "data"):
        for record in records(runs, name):
            lines.append(f"{name}: {literal(_entries_in_words(record))}")
    return lines


def _fact(name: str, values: Sequence[str | None]) -> str:
    distinct = dict.fromkeys(value or "not recorded" for value in values)
    return f"{name}: {literal(', '.join(distinct))}"


def _entries_in_words(record: dict[str, Any]) -> str:
    entries = []
    for key, value in record.items():
        if not isinstance(value, dict):
            entries.append(f"{key} {value}")
    return ", ".join(entries)
