"""`anlit benchmark NAME`: finds the benchmark and runs it."""

import importlib

from anlit.errors import UserError

BENCHMARKS = {
    "attention": (
        "anlit.benchmarks.attention.benchmark",
        "attention kernels: right or not, time, share of the peak, memory",
    ),
    "folding": ("anlit.benchmarks.folding", "forward time of nGPT and anGPT, folded and not, beside GPT+"),
    "step": ("anlit.benchmarks.step", "training steps of our models beside each other and beside peers'"),
    "decoding": ("anlit.benchmarks.decoding", "generating with shared keys: tokens per second and the cache's memory"),
    "growth": ("anlit.benchmarks.growth.benchmark", "how a step's time and memory grow with T, d and L"),
    "loss": ("anlit.benchmarks.loss", "memory of the vocabulary projection with its cross-entropy"),
    "data": (
        "anlit.benchmarks.data.benchmark",
        "preparing text and streaming batches",
    ),
    "gpu": ("anlit.benchmarks.gpu.benchmark", "the first hour on a GPU: kernels checked, then everything timed"),
}


def usage() -> str:
    """What `anlit benchmark --help` prints."""
    lines = "\n".join(f"  {name:<11}{what}" for name, (_, what) in BENCHMARKS.items())
    return (
        f"usage: anlit benchmark NAME [OPTIONS]\n\nbenchmarks:\n{lines}\n\n"
        "anlit benchmark NAME --help lists the options of one."
    )


def main(argv: list[str]) -> int:
    """`anlit benchmark`; returns the exit status and raises UserError for the user's mistakes."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] not in BENCHMARKS:
        raise UserError(f"There is no benchmark '{argv[0]}': choose one of {', '.join(BENCHMARKS)}.")
    return importlib.import_module(BENCHMARKS[argv[0]][0]).main(argv[1:])
