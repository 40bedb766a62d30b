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
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from anlit.benchmarks.options import add_device_options, check_names, device_of, names, parser_of, preset_of, say
from anlit.benchmarks.peers.clock import seconds_of
from anlit.benchmarks.rates import FLOAT32, bandwidth, matrix_peak
from anlit.benchmarks.record import Record, Table
from anlit.benchmarks.step.ours import MODELS, OurStep
from anlit.benchmarks.step.plan import HOW, NAMES, PRESETS, Size, add_size_options, changed_size
from anlit.benchmarks.step.profile_groups import (
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
from anlit.models.runtime import Runtime

WARM_UP = 3


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
    architecture: str, size: Size, device: torch.device, compiled: str, steps: int, rates: tuple[float, float]
) -> dict[str, Any]:
    """One architecture's row: seconds of a step without the profiler, by group with it, the floors."""
    step = OurStep(architecture, size, device, Runtime(compile=compiled != "no"))
    run: Callable[[], Any] = step.train
    seconds_of(run, device, WARM_UP)
    plain = min(seconds_of(run, device, 1) for _ in range(steps))
    mark(step)
    groups, largest = seconds_by_group(run, device, steps)
    row = {"model": architecture, "compiled": compiled, "seconds": plain, "groups": groups, "largest": largest}
    return {**row, "floors": floors(step, size, *rates)}


def main(argv: list[str]) -> int:
    """`anlit benchmark profile`; returns the exit status and raises UserError for the user's mistakes."""
    given = _parser().parse_args(argv)
    check_names("models", given.models, MODELS)
    check_names("compiled", given.compiled, ("no", "blocks"))
    preset, device = preset_of(given), device_of(given)
    size = changed_size(PRESETS[preset].size, given)
    record = Record("profile", argv, given.output, device, f"profile-{preset}", size=size.as_json(), rows=[])
    peak, rate = matrix_peak(device, size.dtype), bandwidth(device)
    say(f"{peak / 1e12:.3g} TFLOP/s in a product of matrices, {rate / 1e9:.3g} GB/s in copying")
    record.keep(peak_flops_per_second=peak, bytes_per_second=rate)
    for compiled in given.compiled:
        for architecture in given.models:
            say(f"{architecture}, {HOW[compiled]}")
            row = measure(architecture, size, device, compiled, given.steps, (peak, rate))
            record.values["rows"].append(row)
            record.keep()
    rates = f"{peak / 1e12:.3g} TFLOP/s, {rate / 1e9:.3g} GB/s"
    by_mode = {how: [row for row in record.values["rows"] if row["compiled"] == how] for how in given.compiled}
    record.finish([table(rows, how, rates) for how, rows in by_mode.items()])
    return 0


def table(rows: list[dict[str, Any]], compiled: str, rates: str) -> Table:
    """Of the models in one mode: a row for each part of the step, ms and share, and each model's floor."""
    head = ["part", *(_name(row) for row in rows), *(f"floor {_name(row)}" for row in rows)]
    lines = [
        [part, *(_with_share(row, part) for row in rows), *(_ms(row["floors"].get(part, 0)) for row in rows)]
        for part in GROUPS
    ]
    lines.append(["unprofiled", *(_ms(row["seconds"]) for row in rows)])
    lines[-1] += [_ms(sum(row["floors"].values())) for row in rows]
    return Table(f"ms of a step, {HOW[compiled]}; floors at {rates}", head, lines)


def _name(row: Mapping[str, Any]) -> str:
    return str(NAMES.get(row["model"], row["model"]))


def _with_share(row: Mapping[str, Any], group: str) -> str:
    share = row["groups"][group] / (sum(row["groups"].values()) or 1.0)
    return f"{_ms(row['groups'][group])} ({share:.0%})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("profile", __doc__, "--preset cpu --compiled no,blocks")
    add_device_options(parser, PRESETS)
    add = parser.add_argument
    add("--models", type=names, default=tuple(MODELS), metavar="A,…", help=f"of {', '.join(MODELS)} (all)")
    add("--compiled", type=names, default=("no", "blocks"), metavar="A,…", help="of no, blocks (both)")
    add("--steps", type=int, default=5, help="steps to profile (%(default)s)")
    add_size_options(parser)
    return parser
