"""A comparison as a section of a page, and as a table in the terminal."""

from collections.abc import Callable, Sequence

from anlit.compare.comparison import Comparison, Result
from anlit.compare.statistics import Summary, mean_sd
from anlit.reporting.table import NONE, Table, markdown_table
from anlit.reporting.table import console as terminal
from anlit.reporting.text import code, literal, minus, without_control_codes
from anlit.runs.folders import Run
from anlit.runs.groups import records

PRINTED = ("validation loss", "speed-up, tokens", "time per token", "speed-up, wall-clock")
"""The columns that fit into a terminal of 80 characters."""
DEFINITION = """\
Losses are in nats per token at the end of training, and values mean ± standard deviation over seeds. *Speed-up, tokens*
is the tokens at which the baseline first has its own final loss over those at which the other first has it, never
smoothed or extrapolated: the geometric mean over the seeds that both have, or "k of n seeds" if a run never gets there.
*% of tokens* is its inverse. *Time per token* is that of training steps in turns in one process over the baseline's;
*speed-up, wall-clock* is the speed-up in tokens divided by it. *Seconds* of the runs include other work of the machine.
Intervals are of 95 %. *Holm* corrects p for the number of configurations; significant is below 0.05. Few
seeds make wide intervals: read those first."""


def section(comparison: Comparison, explained: bool = False) -> list[str]:
    """A comparison in Markdown: findings with tests, curves, losses, speed-ups; definitions unless `explained`."""
    rows = [
        [literal(_name(result, comparison)), *_cells(result).values()]
        for result in comparison.results
    ]
    return [
        "\n".join(f"- {_finding(result)}." for result in comparison.results[1:])
        or "- There is only the baseline.",
        f"![validation loss over tokens{' and time' * bool(comparison.steps)}]({comparison.plot.name})",
        markdown_table(["configuration", *_cells(comparison.baseline)], rows),
        "" if explained else DEFINITION,
    ]


def show(comparison: Comparison) -> None:
    """Prints the main columns, the notes and the path of the plot."""
    rows = [[_name(result, comparison), *(_cells(result)[name].replace(" (", "\n(") for name in PRINTED)]
            for result in comparison.results]  # fmt: skip
    console, head = terminal(), ["configuration", *(name.replace(" ", "\n", 1) for name in PRINTED)]
    console.print(Table(f"Convergence against {comparison.baseline.label}", head, rows))
    for note in comparison.notes:
        console.print(without_control_codes(f"note: {note}"))
    paths = without_control_codes(
        f"Plot: {comparison.plot}, page: {comparison.output / 'report.html'}"
    )
    console.print(paths, soft_wrap=True)


def _finding(result: Result) -> str:
    """The difference of a configuration's loss, its speed-up, and how certain they are."""
    loss, label = mean_sd(result.final_loss, 4), f"**{literal(result.label)}**"
    ends = "is so far" if result.group.unfinished else "ends"
    words = (
        f"{ends} at {loss} nats per token"
        if result.final_loss.mean
        else f"has a loss on {loss} only"
    )
    if (test := result.loss) is not None and result.p_holm is not None:
        sure = "significant" if result.p_holm < 0.05 else "not significant"
        difference = minus(f"{test.difference:+.4f} ({test.low:+.4f} … {test.high:+.4f})")
        n = " and ".join(map(str, dict.fromkeys(test.n)))
        words += (f", {difference} from the baseline: {sure} by the {test.method}, n = {n}, {_p(test.p)}, "
                  f"Holm {_p(result.p_holm)}")  # fmt: skip
    wall_clock = f", {_wall_clock(result)} in wall-clock" if result.wall_clock else ""
    return f"{label} {words}; speed-up {result.speedup.words} in tokens{wall_clock}"


def _wall_clock(result: Result) -> str:
    return f"{'≥ ' * result.speedup.bound}{result.wall_clock}{result.speedup.pairs}"


def _cells(result: Result) -> dict[str, str]:
    """The values of a configuration, by the columns of the table."""
    group, speedup, summaries = result.group, result.speedup, result.summaries
    return {
        "seeds": str(len(group.counted))
        + f" of {len(result.final_loss.values)}" * bool(group.lost)
        + f" ({len(speedup.values)} paired)" * bool(speedup.left_out),
        "parameters": f"{group.counted[0].parameters:,}" if group.counted[0].parameters else NONE,
        "validation loss": mean_sd(result.final_loss, 4),
        "bits per byte": mean_sd(summaries["bits_per_byte"], 4),
        "tokens": mean_sd(Summary([summaries["tokens"].mean]), 0),
        "seconds": mean_sd(summaries["seconds"], 0),
        "speed-up, tokens": speedup.words,
        "% of tokens": NONE if speedup.mean is None else f"{100 / speedup.mean:.0f} %",
        "time per token": str(result.time or NONE),
        "speed-up, wall-clock": _wall_clock(result) if result.wall_clock else NONE,
    }


def _name(result: Result, comparison: Comparison) -> str:
    marks = ["baseline"] * (result is comparison.baseline) + [
        "unfinished"
    ] * result.group.unfinished
    return f"{result.label} ({', '.join(marks)})" if marks else result.label


def sources(
    runs: Sequence[Run],
    label_of: Callable[[Run], str | None],
    counted: Sequence[Run],
    made: list[str],
) -> list[str]:
    """The end of a report: a table of `runs`, and what made the numbers of the `counted` ones, after the lines `made`.

    Runs without a label are marked as not counted.
    """
    rows = []
    for run in runs:
        error = str(run.record.get("error") or "").partition("\n")[0]
        cells = [
            label_of(run) or f"(not counted) {run.architecture}, {run.attention}",
            NONE if run.seed is None else str(run.seed),
            f"{run.final_loss:.4f}" if len(run.curve) else NONE,
            f"{run.state}: {error}" if error else run.state,
            run.commit or NONE,
        ]
        rows.append([*map(literal, cells), code(str(run.folder))])
    head = ["configuration", "seed", "validation loss", "status", "commit", "folder"]
    commands = [
        str(launch["command"])
        for run in counted
        for launch in run.launches
        if launch.get("command")
    ]
    lines = made + [f"trained with: {code(command)}" for command in dict.fromkeys(commands)]
    told = {
        "commits": [run.commit for run in counted],
        "hardware": [run.hardware for run in counted],
    }
    facts = [
        (name, [*dict.fromkeys(value or "not recorded" for value in own)])
        for name, own in told.items()
    ]
    facts += [(name, [f"{key} {value}" for key, value in record.items() if not isinstance(value, dict)])
              for name in ("versions", "data") for record in records(counted, name)]  # fmt: skip
    lines += [f"{name}: {literal(', '.join(values))}" for name, values in facts]
    table = markdown_table(head, rows, left=(0, 3, 4, 5))
    return [
        "## Runs",
        table,
        "## Where the numbers come from",
        "\n".join(f"- {line}" for line in lines),
    ]


def _p(value: float) -> str:
    return "p < 0.0001" if value < 1e-4 else f"p = {value:.{4 if value < 0.01 else 2}f}"
