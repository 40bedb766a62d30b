"""`anlit benchmark growth`: how a training step's time and memory grow with T, d and L.

Along each axis one number grows and the others stay. Over T the tokens of a batch stay too, in ever fewer and longer
sequences, so that what grows is attention alone. Every time and memory is fitted by a power of what grew, and beside it
stands the exponent of the step's FLOPs, fitted over the same points. What does not grow (the vocabulary, a step's fixed
costs) flattens an exponent, and a device that small steps leave idle does too.
"""

import argparse
import gc
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from scipy.stats import linregress
from scipy.stats import t as student

from anlit.benchmarks.growth_plot import plot
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
from anlit.benchmarks.step_report import quartiles
from anlit.benchmarks.step_size import Size
from anlit.benchmarks.step_table import WIDTH, print_table
from anlit.benchmarks.step_worker import Timed
from anlit.errors import UserError
from anlit.evaluation.report import device_name
from anlit.models.runtime import Runtime
from anlit.reporting.files import output_folder, write_json
from anlit.reporting.provenance import environment

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


def size_at(base: Size, axis: str, value: int) -> Size:
    """The base with one number changed; heads keep their width, and over T the batch its tokens."""
    changes: dict[str, Any] = {AXES[axis]: value}
    if axis == "T":
        changes["batch"] = max(1, base.tokens // value)
    if axis == "d":
        changes["n_heads"] = max(1, value // HEADWIDTH)
    return replace(base, **changes)


def measure(
    size: Size, models: Sequence[str], device: torch.device, compiled: bool, rounds: int
) -> list[dict[str, Any]]:
    """One point: seconds of a step, its peak bytes and its FLOPs for each model, which take turns."""
    rows: list[dict[str, Any]] = []
    running: list[tuple[dict[str, Any], Timed]] = []
    for model in models:
        row: dict[str, Any] = {"model": model, "size": size.as_json(), "reason": None}
        rows.append(row)
        try:
            step = OurStep(model, size, device, Runtime(compile=compiled))
            timed = Timed(step, device)
            timed.answer({"do": "time", "kind": "train", "repeats": WARM_UP})
            row |= {
                "flops": step.flops_per_token() * size.tokens,
                "bytes": timed.answer({"do": "peak", "kind": "train"})["bytes"],
            }
            running.append((row, timed))
        except RuntimeError as error:  # out of memory
            row["reason"] = str(error).splitlines()[0][:200]
            say(f"{model} is left out: {row['reason']}")
    seconds: list[list[float]] = [[] for _ in running]
    for turn in range(rounds):
        for place in range(len(running)):
            number = (turn + place) % len(running)
            seconds[number].append(running[number][1].answer({"do": "time", "kind": "train", "repeats": 1})["seconds"])
    for (row, _), values in zip(running, seconds, strict=True):
        row["seconds"] = quartiles(values)
    return rows


def exponent(x: Sequence[float], y: Sequence[float]) -> dict[str, float] | None:
    """Least squares of log y over log x: the slope with its 95 % interval; None for fewer than three points."""
    if len(x) < 3:
        return None
    found = linregress(np.log(x), np.log(y))
    half = float(student.ppf(0.975, len(x) - 2) * found.stderr)
    return {"exponent": float(found.slope), "low": float(found.slope) - half, "high": float(found.slope) + half,
            "constant": float(np.exp(found.intercept))}  # fmt: skip


def fits(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each axis and model the exponents of seconds, bytes and FLOPs."""
    found = []
    for axis, model in dict.fromkeys((point["axis"], point["model"]) for point in points):
        mine = [p for p in points if (p["axis"], p["model"], p["reason"]) == (axis, model, None)]
        x = [float(p["value"]) for p in mine]
        held = [p["bytes"] for p in mine]
        found.append({
            "axis": axis,
            "model": model,
            "points": len(mine),
            "seconds": exponent(x, [p["seconds"]["median"] for p in mine]),
            "bytes": exponent(x, held) if all(held) else None,
            "flops": exponent(x, [p["flops"] for p in mine]),
        })  # fmt: skip
    return found


def benchmark(given: argparse.Namespace, preset: str, command: str) -> dict[str, Any]:
    """Measure along the axes, print the exponents, and write growth.json and growth.png; returns the record.

    Raises:
        UserError: The folder cannot be written, or a sequence is longer than a batch.
    """
    folder, device = output_folder(given.output), device_of(given, preset)
    base = changed_size(BASES[preset], given)
    record: dict[str, Any] = {"benchmark": "growth", "command": command, "environment": environment()}
    record["environment"]["hardware"]["device"] = device_name(device)
    record |= {"threads": torch.get_num_threads(), "compiled": given.compiled, "size": base.as_json(), "points": []}
    for axis in given.grow:
        for value in given.values or POINTS[preset][axis]:
            if axis == "T" and value > base.tokens:
                raise UserError(
                    f"over T a batch keeps its {base.tokens} tokens, and one sequence of {value} has more: "
                    "raise --batch, or leave that value out of --values"
                )
            say(f"{axis} = {value}")
            torch._dynamo.reset()
            rows = measure(size_at(base, axis, value), given.models, device, given.compiled, given.rounds)
            record["points"] += [{"axis": axis, "value": value, **row} for row in rows]
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    record["fits"] = fits(record["points"])
    write_json(folder / "growth.json", record)
    plot(record, folder / "growth.png")
    lines = [
        [fit["model"], fit["axis"], *(_text(fit[kind]) for kind in ("seconds", "flops", "bytes"))]
        for fit in record["fits"]
    ]
    columns = ("model", "over", "time's exponent", "FLOPs' exponent", "memory's exponent")
    print_table(Console(width=WIDTH), "exponents (95 % intervals)", columns, lines)
    print(f"Written to {folder / 'growth'}.json and .png.")
    return record


def _text(fit: Mapping[str, float] | None) -> str:
    return "–" if fit is None else f"{fit['exponent']:.2f} ({fit['low']:.2f} – {fit['high']:.2f})"


def main(argv: list[str]) -> int:
    """`anlit benchmark growth`; returns the exit status and raises UserError for the user's mistakes."""
    parser = argparse.ArgumentParser(
        prog="anlit benchmark growth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: anlit benchmark growth --preset cpu --grow T",
    )
    add = parser.add_argument
    add("--preset", choices=list(BASES), help="what to measure (h200 where there is a GPU, else cpu)")
    add("--grow", type=names, default=tuple(AXES), metavar="A,…", help="of T, d, L (all)")
    add("--values", type=lambda text: tuple(map(int, text.split(","))), metavar="N,…", help="in place of the preset's")
    add("--models", type=names, default=tuple(MODELS), metavar="A,…", help=f"of {', '.join(MODELS)} (all)")
    add("--compiled", action="store_true", help="compile the blocks")
    add("--rounds", type=int, default=5, help="steps of each at each point (%(default)s)")
    add_size_options(parser)
    add("--output", default="runs/benchmark", help="folder for growth.json and .png (%(default)s)")
    given = parser.parse_args(argv)
    check_names("grow", given.grow, AXES)
    check_names("models", given.models, MODELS)
    benchmark(given, given.preset or default_preset(), shlex.join(["anlit", "benchmark", "growth", *argv]))
    return 0
