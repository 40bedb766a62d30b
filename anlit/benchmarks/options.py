"""Options that benchmarks share."""

import argparse
import sys
import time
from collections.abc import Collection
from typing import Any

import torch

from anlit.errors import UserError
from anlit.options import CommandParser

OUTPUT = "runs/benchmark"
MINUTES = 7.5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parser_of(name: str, description: str | None, example: str) -> CommandParser:
    """A parser with --output, and with the texts of --help."""
    parser = CommandParser(
        prog=f"anlit benchmark {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"Example: anlit benchmark {name} {example}",
    )
    parser.add_argument("--output", default=OUTPUT, help="folder for what it writes (%(default)s)")
    return parser


def add_device_options(parser: argparse.ArgumentParser, presets: Collection[str] = ()) -> None:
    """--device, --threads, and --preset where there are presets."""
    if presets:
        parser.add_argument("--preset", choices=list(presets), help="what to measure (h200 on a GPU, else cpu)")
    parser.add_argument("--device", help="a torch device (a GPU where there is one)")
    parser.add_argument("--threads", type=int, help="processor threads of each program (torch's own number)")


def add_loop_options(parser: argparse.ArgumentParser, rounds: int | None = None, minutes: float = MINUTES) -> None:
    """--rounds, with the preset's or this default, and --minutes."""
    shown = "the preset's" if rounds is None else rounds
    parser.add_argument("--rounds", type=int, default=rounds, help=f"number of rounds ({shown})")
    parser.add_argument(
        "--minutes", type=float, default=minutes, help="start nothing new after this time (%(default)s)"
    )


def preset_of(given: argparse.Namespace) -> str:
    """The given preset, else the one for this machine."""
    return given.preset or ("h200" if torch.cuda.is_available() else "cpu")


def device_of(given: argparse.Namespace) -> torch.device:
    """The given device, else that of the given preset, else a GPU if there is one. It also sets the number of threads.

    Raises:
        UserError: This machine does not have it.
    """
    preset = getattr(given, "preset", None)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(given.device or {None: default, "cpu": "cpu"}.get(preset, "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
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


def say(text: str) -> None:
    """Print to standard error, with the time."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)
