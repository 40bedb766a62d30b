"""`anlit compare`: a report on trained runs."""

import shlex

from anlit.compare.compare import STANDARD, compare
from anlit.compare.comparison import STEPS
from anlit.config.options import ToolParser


def parser() -> ToolParser:
    parser = ToolParser(
        prog="anlit compare",
        description="Compares trained runs: how many tokens, and how much time, does each "
        "configuration need to reach the baseline's final validation loss? Runs that differ only "
        "in their seed are averaged.",
        epilog="Writes report.html, report.md, convergence.json and the picture. Example: "
        "anlit compare runs/gpt runs/ngpt runs/angpt --output reports/first",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folder, or a folder with run folders below it")
    add("--output", required=True, metavar="DIR", help="folder for the report; made where missing")
    add(
        "--baseline",
        metavar="NAME",
        help="the configuration to compare with: a group's label as in the report, an architecture "
        f"with one group, or a run folder (default: {STANDARD}, and the group with the lowest "
        "final loss if there are several)",
    )
    add(
        "--measure_steps",
        action="store_true",
        help="time training steps of all configurations in turns on this machine, for the speed-up "
        f"in wall-clock; {STEPS} in DIR keeps them for later calls",
    )
    return parser


def main(argv: list[str]) -> None:
    options = parser().parse_args(argv)
    if options.measure_steps:
        from anlit.benchmarks.run_steps import time_steps  # torch
    compare(
        options.runs,
        options.output,
        options.baseline,
        time_steps if options.measure_steps else None,
        shlex.join(["anlit", "compare", *argv]),
    )
