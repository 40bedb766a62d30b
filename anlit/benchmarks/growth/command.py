"""`anlit benchmark growth`: how a training step's time and memory grow with T, d and L.

Along each axis one number grows and the others stay. Over T the tokens of a batch stay too, in ever fewer and longer
sequences, so that what grows is attention alone. Every time and memory is fitted by a power of what grew, and beside it
stands the exponent of the step's FLOPs, fitted over the same points. What does not grow (the vocabulary, a step's fixed
costs) flattens an exponent, and a device that small steps leave idle does too. On a GPU the blocks are compiled.
"""

import argparse
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.stats import linregress
from scipy.stats import t as student

from anlit.benchmarks.attention.cases import MECHANISMS
from anlit.benchmarks.growth.plot import plot
from anlit.benchmarks.options import (
    MINUTES,
    add_device_options,
    check_names,
    device_of,
    names,
    numbers,
    parser_of,
    preset_of,
    say,
)
from anlit.benchmarks.peers.training_step import TimedStep
from anlit.benchmarks.rates import prepare_compiler
from anlit.benchmarks.record import Record, Table
from anlit.benchmarks.step.ours import MODELS, OurStep
from anlit.benchmarks.step.plan import NAMES, Size, add_size_options, changed_size
from anlit.benchmarks.turns import alternate, quartiles
from anlit.errors import UserError
from anlit.models.runtime import Runtime

AXES = {"T": "length", "d": "d_model", "L": "n_layers"}
HEADWIDTH = 64
POINTS: dict[str, dict[str, tuple[int, ...]]] = {
    "cpu": {"T": (128, 256, 512, 1024, 2048), "d": (64, 128, 256, 512), "L": (1, 2, 4, 8)},
    "h200": {
        "T": (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536),
        "d": (256, 512, 1024, 2048),
        "L": (3, 6, 12, 24, 48),
    },
}
BASES = {
    "cpu": Size("small", 128, 2, 2, 4096, 256, 8, torch.float32),
    "h200": Size("d 512, 12 layers", 512, 12, 8, 50_304, 2048, 32, torch.bfloat16),
}
WARM_UP = 2
HEADINGS = ("model", "over", "time's exponent", "FLOPs' exponent", "memory's exponent")


def size_at(base: Size, axis: str, value: int) -> Size:
    """The base with one number changed; heads keep their width, and over T the batch its tokens.

    Raises:
        UserError: The sequence is longer than a batch.
    """
    changes: dict[str, Any] = {AXES[axis]: value}
    if axis == "T":
        if value > base.tokens:
            raise UserError(
                f"over T a batch keeps its {base.tokens} tokens, and one sequence of {value} has more: "
                "raise --batch, or leave that value out of --values"
            )
        changes["batch"] = base.tokens // value
    if axis == "d":
        changes["n_heads"] = max(1, value // HEADWIDTH)
    return replace(base, **changes)


def measure(size: Size, given: argparse.Namespace, device: torch.device, runtime: Runtime) -> list[dict[str, Any]]:
    """One point: seconds of a step, its peak bytes and its FLOPs for each model, which take turns."""
    rows: list[dict[str, Any]] = []
    running: list[tuple[dict[str, Any], TimedStep]] = []
    for model in given.models:
        row: dict[str, Any] = {"model": model, "size": size.as_json(), "reason": None}
        rows.append(row)
        try:
            timed = TimedStep(OurStep(model, size, device, runtime, MECHANISMS[given.mechanism]), device)
            timed.seconds("train", WARM_UP)
            row |= {"flops": timed.step.flops_per_token() * size.tokens, "bytes": timed.peak()}
            running.append((row, timed))
        except RuntimeError as error:  # out of memory
            row["reason"] = str(error).splitlines()[0][:200]
            say(f"{model} is left out: {row['reason']}")
    calls = {number: partial(timed.seconds, "train") for number, (_, timed) in enumerate(running)}
    for number, values in alternate(calls, given.rounds).items():
        running[number][0]["seconds"] = quartiles(values)
    return rows


def exponent(x: Sequence[float], y: Sequence[float]) -> dict[str, float] | None:
    """Least squares of log y over log x: the slope with its 95 % interval; None for fewer than three points."""
    if len(x) < 3:
        return None
    found = linregress(np.log(x), np.log(y))
    half = float(student.ppf(0.975, len(x) - 2) * found.stderr)
    slope = float(found.slope)
    return {"exponent": slope, "low": slope - half, "high": slope + half, "constant": float(np.exp(found.intercept))}


def fits(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each axis and model the exponents of seconds, bytes and FLOPs."""
    found = []
    for axis, model in dict.fromkeys((point["axis"], point["model"]) for point in points):
        mine = [p for p in points if (p["axis"], p["model"], p["reason"]) == (axis, model, None)]
        x = [float(p["value"]) for p in mine]
        held = [p["bytes"] for p in mine]
        fit: dict[str, Any] = {"axis": axis, "model": model, "points": len(mine)}
        fit["seconds"] = exponent(x, [p["seconds"]["median"] for p in mine])
        fit["bytes"] = exponent(x, held) if all(held) else None
        fit["flops"] = exponent(x, [p["flops"] for p in mine])
        found.append(fit)
    return found


def table(found: Sequence[Mapping[str, Any]]) -> Table:
    """The exponents."""
    kinds = ("seconds", "flops", "bytes")
    rows = [[NAMES.get(f["model"], f["model"]), f["axis"], *(_text(f[kind]) for kind in kinds)] for f in found]
    return Table("Exponents (95 % intervals)", HEADINGS, rows)


def _text(fit: Mapping[str, float] | None) -> str:
    return "–" if fit is None else f"{fit['exponent']:.2f} ({fit['low']:.2f} – {fit['high']:.2f})"


def main(argv: list[str]) -> int:
    """`anlit benchmark growth`; returns the exit status and raises UserError for the user's mistakes."""
    given = _parser().parse_args(argv)
    check_names("grow", given.grow, AXES)
    check_names("models", given.models, MODELS)
    began, preset, device = time.monotonic(), preset_of(given), device_of(given)
    base = changed_size(BASES[preset], given)
    runtime = Runtime(compile=device.type == "cuda" or given.compiled)
    sizes = [
        (axis, value, size_at(base, axis, value))
        for axis in given.grow
        for value in given.values or POINTS[preset][axis]
    ]
    prepare_compiler()
    settings = {"compiled": runtime.compile, "mechanism": given.mechanism, "size": base.as_json()}
    record = Record("growth", argv, given.output, device, **settings, points=[], left_out=[])
    points, left_out = record.values["points"], record.values["left_out"]
    for axis, value, size in sizes:
        if time.monotonic() - began > 60 * given.minutes:
            left_out.append(f"{axis} = {value}")
            continue
        say(f"{axis} = {value}")
        points += [{"axis": axis, "value": value, **row} for row in measure(size, given, device, runtime)]
        record.keep()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    record.keep(fits=fits(points))
    plot(record.values, record.path("png"))
    lines = [f"Left out after {given.minutes:g} minutes: {', '.join(left_out)}."] if left_out else []
    record.finish([table(record.values["fits"])], notes=lines)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("growth", __doc__, "--preset cpu --grow T")
    add_device_options(parser, BASES)
    add = parser.add_argument
    add("--grow", type=names, default=tuple(AXES), metavar="A,…", help="of T, d, L (all)")
    add("--values", type=numbers, metavar="N,…", help="in place of the preset's")
    add("--models", type=names, default=tuple(MODELS), metavar="A,…", help=f"of {', '.join(MODELS)} (all)")
    add("--mechanism", choices=list(MECHANISMS), default="plain", help="attention's (%(default)s)")
    add("--compiled", action="store_true", help="compile the blocks on the CPU too")
    add("--rounds", type=int, default=5, help="steps of each at each point (%(default)s)")
    add("--minutes", type=float, default=MINUTES, help="begin no further point after so long (%(default)s)")
    add_size_options(parser)
    return parser
