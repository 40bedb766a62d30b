"""`anlit benchmark NAME`: finds the benchmark and runs it."""

import argparse
import importlib

from anlit.config.options import ToolParser

BENCHMARKS = {
    "attention": "attention kernels: right or not, time, share of the peak, memory",
    "step": "training steps of our models, and of peers', compared",
    "fit": "steps of a run, with and without loader, callbacks and logging",
    "loss": "memory of the vocabulary projection with its cross-entropy",
}
"""Name of a file in anlit/benchmarks → what it measures."""


def parser() -> ToolParser:
    """Return the option that all benchmarks share: the name. Each has its own options beside it."""
    parser = ToolParser(
        prog="anlit benchmark",
        usage="anlit benchmark NAME [OPTIONS]",
        description="\n".join(f"  {name:<11}{text}" for name, text in BENCHMARKS.items()),
        epilog="anlit benchmark NAME --help lists the options of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", choices=list(BENCHMARKS), help="one of these")
    return parser


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in BENCHMARKS:
        parser().parse_args(argv[:1] or ["--help"])  # raises UserError, or exits after the help
    return importlib.import_module(f"anlit.benchmarks.{argv[0]}").main(argv[1:])
