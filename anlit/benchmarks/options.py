"""Options that benchmarks share."""

import argparse
from collections.abc import Collection
from typing import Any

import torch

from anlit.errors import UserError
from anlit.sentences import ToolParser


def parser_of(name: str, description: str | None, example: str, presets: Collection[str] = ()) -> ToolParser:
    """A parser with --output, --device, --threads and, if there are presets, --preset, and with the texts of --help."""
    parser = ToolParser(
        prog=f"anlit benchmark {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"Example: anlit benchmark {name} {example}",
    )
    add = parser.add_argument
    add("--output", default="runs/benchmark", help="folder for what it writes (%(default)s)")
    if presets:
        here = "h200" if torch.cuda.is_available() else "cpu"
        add("--preset", choices=list(presets), default=here, help="what to measure (%(default)s)")
    add("--device", help="a torch device (a GPU where there is one)")
    add("--threads", type=int, help="processor threads (torch's own number)")
    return parser


def add_loop_options(parser: argparse.ArgumentParser) -> None:
    """--rounds and --minutes."""
    parser.add_argument("--rounds", type=int, help="number of rounds")
    parser.add_argument("--minutes", type=float, default=7.5, help="start nothing new after this time (%(default)s)")


def device_of(given: argparse.Namespace) -> torch.device:
    """The given device, else that of the preset, else a GPU if there is one. It also sets the number of threads.

    Raises:
        UserError: This machine does not have it.
    """
    preset, here = getattr(given, "preset", None), torch.cuda.is_available()
    device = torch.device(given.device or ("cuda" if (here if preset is None else preset != "cpu") else "cpu"))
    if device.type == "cuda" and not here:
        what = f"--device {given.device}" if given.device else f"--preset {preset}"
        raise UserError(f"{what} needs a CUDA device, and there is none: choose the CPU")
    if given.threads:
        torch.set_num_threads(given.threads)
    return device


def names(text: str) -> tuple[str, ...]:
    """`a,b` → ("a", "b")."""
    return tuple(text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    """`1,2` → (1, 2)."""
    return tuple(int(part) for part in text.split(","))


def check_names(option: str, given: Collection[str] | None, known: Collection[Any]) -> None:
    """Raise UserError for an unknown name."""
    for name in given or ():
        if name not in known:
            raise UserError(f"--{option} {name} is not known: choose from {', '.join(known)}")
