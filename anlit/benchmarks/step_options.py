"""Options that the benchmarks of training steps share."""

import argparse
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from anlit.benchmarks.step_size import Size
from anlit.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES = ("d_model", "n_layers", "n_heads", "vocab_size", "length", "batch")


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """--d-model and so on, --dtype, --device, --threads."""
    for field in SIZES:
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, metavar="N", help="in place of the preset's")
    parser.add_argument("--dtype", choices=list(DTYPES), help="in place of the preset's")
    parser.add_argument("--device", help="a torch device, in place of the preset's")
    parser.add_argument("--threads", type=int, help="processor threads of each program (torch's own number)")


def changed_size(size: Size, given: argparse.Namespace) -> Size:
    """The preset's with what was given in its place; then it has another label."""
    changes: dict[str, Any] = {field: value for field in SIZES if (value := getattr(given, field))}
    if given.dtype:
        changes["dtype"] = DTYPES[given.dtype]
    return replace(size, **changes, label=f"{size.label}, changed") if changes else size


def default_preset() -> str:
    return "h200" if torch.cuda.is_available() else "cpu"


def device_of(given: argparse.Namespace, preset: str) -> torch.device:
    """The device that was asked for, or the preset's; sets the number of threads too.

    Raises:
        UserError: It is not here.
    """
    device = torch.device(given.device or ("cpu" if preset == "cpu" else "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        what = f"--device {given.device}" if given.device else f"--preset {preset}"
        raise UserError(f"{what} needs a CUDA device, and there is none: choose --preset cpu or --device cpu")
    if given.threads:
        torch.set_num_threads(given.threads)
    return device


def names(text: str) -> tuple[str, ...]:
    """From `a,b`."""
    return tuple(text.split(","))


def check_names(option: str, given: tuple[str, ...] | None, known: Any) -> None:
    """Raises UserError for a name that is not known."""
    for name in given or ():
        if name not in known:
            raise UserError(f"--{option} {name} is not known: choose from {', '.join(known)}")


def say(text: str) -> None:
    """To standard error, with the time."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)
