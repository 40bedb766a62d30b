"""`anlit benchmark profile`: where the time of a training step goes, beside what the hardware allows.

The floor of each part is what the formulas ask for, at rates measured in this run: matrix products and attention at the
peak of a product of large matrices, all else at the rate of copying memory, as if every tensor were read and written
once. Per token, N weights, d wide, f in the MLP, V in the vocabulary, e bytes a number (2 in bfloat16):

    loss               4·V·e      logits and their gradient, written and read
    elementwise        3·L·(12·d + 3·f)·e: norms, rotations, residuals, the gated activation; backward counts twice
    optimizer          7·4·N per step: weight, gradient and two averages read, all but the gradient written
    clipping           3·4·N per step: gradients read for their norm, read and written for the clipping
    norm restoration   2·4·N per step of the architectures that restore them

A loss that never writes its logits is faster than that floor. On a GPU, time that no kernel runs is in no group.
"""

import argparse
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console
from torch import nn

from anlit.benchmarks.attention_trials import matrix_peak
from anlit.benchmarks.profile_groups import (
    ATTENTION,
    CLIPPING,
    ELEMENTWISE,
    GROUPS,
    LOSS,
    MATRICES,
    NORMS,
    OPTIMIZER,
    PASS,
    marked,
    seconds_by_group,
)
from anlit.benchmarks.step_options import (
    add_size_options,
    changed_size,
    check_names,
    default_preset,
    device_of,
    names,
    say,
)
from anlit.benchmarks.step_ours import MODELS, OurStep
from anlit.benchmarks.step_size import PRESETS, Size
from anlit.benchmarks.step_table import WIDTH, print_table
from anlit.benchmarks.step_worker import seconds_of
from anlit.evaluation.report import device_name
from anlit.models.runtime import Runtime
from anlit.reporting.files import output_folder, write_json
from anlit.reporting.provenance import environment

COPIED = {"cpu": 2**26, "cuda": 2**30}
"""Bytes, well above any cache."""
FLOAT32 = 4
WARM_UP = 3


def bandwidth(device: torch.device) -> float:
    """Bytes per second of copying memory, read and written both counted; the best of ten."""
    source = torch.zeros(COPIED[device.type] // FLOAT32, device=device)
    target = torch.empty_like(source)
    best = min(seconds_of(lambda: target.copy_(source), device, 1) for _ in range(10))
    return 2 * COPIED[device.type] / best


def floors(step: OurStep, size: Size, peak: float, bytes_per_second: float) -> dict[str, float]:
    """Seconds that each part of a step takes at least; see the head of this file."""
    decoder = step.model.model
    linear = sum(module.weight.numel() for module in decoder.modules() if isinstance(module, nn.Linear))
    n, width = step.parameters(), size.dtype.itemsize
    restored = (
        sum(weight.numel() for _, weight in decoder.matrices())
        if next(iter(decoder.row_norms()), None) is not None
        else 0
    )
    elementwise = 3 * size.n_layers * (12 + 3 * 4) * size.d_model * width
    moved = {
        LOSS: 4 * size.vocab_size * width * size.tokens,
        ELEMENTWISE: elementwise * size.tokens,
        OPTIMIZER: 7 * FLOAT32 * n,
        CLIPPING: 3 * FLOAT32 * n,
        NORMS: 2 * FLOAT32 * restored,
    }
    flops = {MATRICES: 6.0 * linear * size.tokens}
    flops[ATTENTION] = step.flops_per_token() * size.tokens - flops[MATRICES]
    return {part: count / peak for part, count in flops.items()} | {
        part: count / bytes_per_second for part, count in moved.items()
    }


def mark(step: OurStep) -> None:
    """Put the model's hooks into ranges that the profile tells apart."""
    model: Any = step.model
    for name, group in (
        ("training_step", PASS),
        ("backward", PASS),
        ("configure_gradient_clipping", "anlit::clipping"),
    ):
        setattr(model, name, marked(getattr(model, name), group))
    model.model.restore_norms = marked(model.model.restore_norms, "anlit::norms")


def measure(
    architecture: str, size: Size, device: torch.device, compiled: bool, steps: int, rates: tuple[float, float]
) -> dict[str, Any]:
    """One architecture's row: seconds of a step without the profiler, by group with it, the floors."""
    step = OurStep(architecture, size, device, Runtime(compile=compiled))
    run: Callable[[], Any] = step.train
    seconds_of(run, device, WARM_UP)
    plain = min(seconds_of(run, device, 1) for _ in range(steps))
    mark(step)
    groups, largest = seconds_by_group(run, device, steps)
    how = "compiled" if compiled else "eager"
    return {"model": architecture, "how": how, "seconds": plain, "groups": groups, "largest": largest,
            "floors": floors(step, size, *rates)}  # fmt: skip


def benchmark(given: argparse.Namespace, preset: str, command: str) -> dict[str, Any]:
    """Profile, print the table and write profile-PRESET.json; returns the record."""
    folder, device = output_folder(given.output), device_of(given, preset)
    size = changed_size(PRESETS[preset].size, given)
    record: dict[str, Any] = {"benchmark": "profile", "command": command, "environment": environment()}
    record["environment"]["hardware"]["device"] = device_name(device)
    peak, rate = matrix_peak(device, size.dtype), bandwidth(device)
    say(f"{peak / 1e12:.3g} TFLOP/s in a product of matrices, {rate / 1e9:.3g} GB/s in copying")
    record |= {"threads": torch.get_num_threads(), "size": size.as_json(), "peak_flops_per_second": peak}
    record |= {"bytes_per_second": rate, "rows": []}
    for how in given.compiled:
        for architecture in given.models:
            say(f"{architecture}, compiled: {how}")
            record["rows"].append(measure(architecture, size, device, how != "no", given.steps, (peak, rate)))
    write_json(folder / f"profile-{preset}.json", record)
    heading = f"ms of a step by part (share); {size.label}, {peak / 1e12:.3g} TFLOP/s, {rate / 1e9:.3g} GB/s"
    print_table(Console(width=WIDTH), heading, ("model", "step", *GROUPS), [_line(row) for row in record["rows"]])
    last = [row for row in record["rows"] if row["how"] == record["rows"][-1]["how"]]  # alike in every mode
    print_table(Console(width=WIDTH), "floor, ms", ("model", "sum", *GROUPS), map(_floor_line, last))
    print(f"Written to {folder / f'profile-{preset}'}.json.")
    return record


def _line(row: Mapping[str, Any]) -> list[str]:
    total = sum(row["groups"].values()) or 1.0
    parts = [f"{1e3 * row['groups'][group]:.3g} ({row['groups'][group] / total:.1%})" for group in GROUPS]
    return [f"{row['model']} {row['how']}", f"{1e3 * row['seconds']:.4g}", *parts]


def _floor_line(row: Mapping[str, Any]) -> list[str]:
    floor = row["floors"]
    return [row["model"], f"{1e3 * sum(floor.values()):.4g}", *(f"{1e3 * floor.get(group, 0):.3g}" for group in GROUPS)]


def main(argv: list[str]) -> int:
    """`anlit benchmark profile`; returns the exit status and raises UserError for the user's mistakes."""
    parser = argparse.ArgumentParser(
        prog="anlit benchmark profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: anlit benchmark profile --preset cpu --compiled no,blocks",
    )
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), help="the shape (h200 where there is a GPU, else cpu)")
    add("--models", type=names, default=tuple(MODELS), metavar="A,…", help=f"of {', '.join(MODELS)} (all)")
    add("--compiled", type=names, default=("no", "blocks"), metavar="A,…", help="of no, blocks (both)")
    add("--steps", type=int, default=5, help="steps to profile (%(default)s)")
    add_size_options(parser)
    add("--output", default="runs/benchmark", help="folder for profile-PRESET.json (%(default)s)")
    given = parser.parse_args(argv)
    check_names("models", given.models, MODELS)
    check_names("compiled", given.compiled, ("no", "blocks"))
    benchmark(given, given.preset or default_preset(), shlex.join(["anlit", "benchmark", "profile", *argv]))
    return 0
