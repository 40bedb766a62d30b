"""`anlit benchmark NAME`: finds the benchmark and runs it."""

import importlib

from anlit.errors import UserError
from anlit.reporting.text import echo

BENCHMARKS = {
    "attention": "attention kernels: right or not, time, share of the peak, memory",
    "step": "training steps of our models, and of peers', compared",
    "loss": "memory of the vocabulary projection with its cross-entropy",
}


def usage() -> str:
    """What `anlit benchmark --help` prints."""
    lines = "\n".join(f"  {name:<11}{what}" for name, what in BENCHMARKS.items())
    return (
        f"usage: anlit benchmark NAME [OPTIONS]\n\nbenchmarks:\n{lines}\n\n"
        "anlit benchmark NAME --help lists the options of one."
    )


def main(argv: list[str]) -> int:
    """`anlit benchmark`; returns the exit status and raises UserError for the user's mistakes."""
    if not argv or argv[0] in ("-h", "--help"):
        echo(usage())
        return 0
    if argv[0] not in BENCHMARKS:
        raise UserError(f"There is no benchmark '{argv[0]}': choose one of {', '.join(BENCHMARKS)}.")
    return importlib.import_module(f"anlit.benchmarks.{argv[0]}").main(argv[1:])
