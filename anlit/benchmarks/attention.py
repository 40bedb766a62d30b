"""`anlit benchmark attention`: mechanisms and kernels beside each other, over head width, length and documents.

For each shape every entrant is first checked against the eager back end in float32 (float64 where it computes in
float32 itself), output and gradients; what is wrong is not timed. Then they take turns in this one process.
"""

import argparse
import json
import os
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import activate_flash_attention_impl, list_flash_attention_impls

from anlit.attention.backends import BACKENDS
from anlit.benchmarks.attention_cases import COMPARED, MECHANISMS, PRESETS, Entrant, Plan
from anlit.benchmarks.attention_plot import plot
from anlit.benchmarks.attention_table import markdown, show, targets
from anlit.benchmarks.attention_trials import matrix_peak, measure
from anlit.errors import UserError
from anlit.models.runtime import flush_denormals
from anlit.reporting.provenance import environment

NAME = "attention"


def benchmark(plan: Plan, device: torch.device, minutes: float, output: Path, command: str) -> dict[str, Any]:
    """Measure, print the table and write `output`/attention.json, .md and .png.

    Args:
        plan: What to measure.
        device: Where.
        minutes: No shape is begun later than this; the record names those left out.
        output: The folder, made if it is not there.
        command: Goes into the record.

    Returns:
        The record: environment, settings, a list of shapes with their entrants, the targets.

    Raises:
        UserError: The folder cannot be written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output} cannot be made ({error.strerror}): give a writable folder") from error
    began = time.monotonic()
    record: dict[str, Any] = {"benchmark": NAME, "command": command, "environment": environment()}
    record["environment"]["hardware"]["device"] = _name_of(device)
    settings = {**vars(plan), "dtype": str(plan.dtype), "entrants": [entrant.label for entrant in plan.entrants]}
    record["settings"] = settings
    record["peak_flops_per_second"] = peak = matrix_peak(device, plan.dtype)
    _say(f"{_name_of(device)}, {plan.dtype}: {peak / 1e12:.3g} TFLOP/s in a product of matrices")
    record["shapes"], record["left_out"] = [], []
    for shape in plan.shapes():
        if time.monotonic() - began > 60 * minutes:
            record["left_out"].append(shape.label)
            continue
        _say(shape.label)
        record["shapes"].append(measure(shape, plan, device, peak, _say))
    if record["left_out"]:
        _say(f"left out after {minutes:g} minutes: {'; '.join(record['left_out'])}")
    record["environment"]["load_after"] = os.getloadavg()[0]
    record |= {"seconds": time.monotonic() - began, "targets": targets(record)}
    (output / f"{NAME}.json").write_text(json.dumps(record, indent=1) + "\n")
    (output / f"{NAME}.md").write_text(markdown(record))
    plot(record, output / f"{NAME}.png")
    show(record)
    print(f"Written to {output / NAME}.json, .md and .png.")
    return record


def main(argv: list[str]) -> int:
    """`anlit benchmark attention`; returns the exit status and raises UserError for the user's mistakes."""
    given = _parser().parse_args(argv)
    cuda = torch.cuda.is_available()
    preset = given.preset or ("h200" if cuda else "cpu")
    device = torch.device("cpu" if preset == "cpu" else "cuda")
    if device.type == "cuda" and not cuda:
        raise UserError(f"--preset {preset} needs a CUDA device, and there is none: choose --preset cpu")
    if device.type == "cpu":
        flush_denormals()  # as a run does
    changes = {
        "widths": given.widths,
        "lengths": given.lengths,
        "rounds": given.rounds,
        "entrants": _entrants(given.entrants) if given.entrants else None,
    }
    plan = replace(PRESETS[preset], **{name: value for name, value in changes.items() if value})
    if given.flash_implementation:
        _activate(given.flash_implementation)
    benchmark(plan, device, given.minutes, given.output, shlex.join(["anlit", "benchmark", NAME, *argv]))
    return 0


def _entrants(text: str) -> tuple[Entrant, ...]:
    """From `mechanism,kernel mechanism,kernel …`."""
    found = []
    for entry in text.split():
        mechanism, _, kernel = entry.partition(",")
        if mechanism not in MECHANISMS:
            raise UserError(f"--entrants {entry}: no mechanism {mechanism!r}; choose {', '.join(MECHANISMS)}")
        if kernel not in {**BACKENDS, **COMPARED}:
            raise UserError(f"--entrants {entry}: no kernel {kernel!r}; choose {', '.join({**BACKENDS, **COMPARED})}")
        found.append(Entrant(mechanism, kernel))
    return tuple(found)


def _activate(name: str) -> None:
    known = list_flash_attention_impls()
    if name not in known:
        raise UserError(f"--flash-implementation {name} is unknown: choose {', '.join(known)}")
    try:
        activate_flash_attention_impl(name)
    except (ImportError, RuntimeError) as error:
        raise UserError(f"--flash-implementation {name} cannot be used ({error}): install its package") from error


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="anlit benchmark attention",
        description="Measures attention kernels: checks each against eager attention in a higher precision, then times "
        "them in turn, forward and forward + backward, beside the device's own peak.",
        epilog="Example: anlit benchmark attention --preset h200 (about 8 minutes), or "
        "anlit benchmark attention --entrants 'plain,sdpa scale-invariant,eager' --widths 64 --lengths 1024",
    )
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), help="what to measure (h200 where there is a GPU, else cpu)")
    add("--entrants", metavar="LIST", help="mechanism,kernel pairs between spaces, in place of the preset's")
    add("--widths", type=_numbers, metavar="D,…", help="head widths")
    add("--lengths", type=_numbers, metavar="T,…", help="tokens in a sequence")
    add("--rounds", type=int, help="how often the entrants take turns")
    add("--minutes", type=float, default=7.5, help="begin no further shape after so long (%(default)s)")
    add("--flash-implementation", metavar="NAME", help="another of PyTorch's flash attentions, such as FA4")
    add("--output", type=Path, default=Path("runs/benchmark"), help=f"folder for {NAME}.json, .md, .png (%(default)s)")
    return parser


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)
