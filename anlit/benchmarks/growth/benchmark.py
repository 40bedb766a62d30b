"""`anlit benchmark growth`: how a training step's time and memory grow with T, d and L.

Along each axis one number grows and the others are constant. Over T the tokens of a batch are constant too, in fewer
and longer sequences, so that only attention grows. Times and memories are fitted by a power of the number, and compared
with the exponent of the step's FLOPs over the same points. Constant costs (the vocabulary, a step's fixed costs) make
an exponent smaller, as does a device that is idle in small steps. On a GPU the blocks are compiled.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from anlit.benchmarks.cases import Case, Group, Ready, Row, measure, notes, timed
from anlit.benchmarks.options import (
    add_device_options,
    add_loop_options,
    check_names,
    device_of,
    names,
    numbers,
    parser_of,
    preset_of,
)
from anlit.benchmarks.our_step import MODELS, OurStep
from anlit.benchmarks.peers.training_step import TimedStep
from anlit.benchmarks.process import is_installed
from anlit.benchmarks.rates import prepare_compiler
from anlit.benchmarks.record import Record, Table
from anlit.benchmarks.size import Size, add_size_options, changed_size
from anlit.benchmarks.step import NAMES
from anlit.errors import UserError
from anlit.models.runtime import Runtime
from anlit.reporting.intervals import PowerLaw, power_law
from anlit.reporting.table import NONE

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
    "cpu": Size(128, 2, 2, 4096, 256, 8, torch.float32),
    "h200": Size(512, 12, 8, 50_304, 2048, 32, torch.bfloat16),
}
WARM_UP = 2
KINDS = ("seconds", "flops", "bytes")
HEADINGS = ("model", "over", "time's exponent", "FLOPs' exponent", "memory's exponent")


def size_at(base: Size, axis: str, value: int) -> Size:
    """The base with one number changed. The width of heads is constant, and over T the number of tokens in a batch.

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


def build(size: Size, device: torch.device, rows: list[Row]) -> Ready:
    """The model of the last row at one point."""
    step = TimedStep(OurStep(rows[-1]["model"], size, device, Runtime(compile=device.type == "cuda")), device)
    step.seconds(WARM_UP)
    flops = {"train": step.facts["flops_per_token"] * size.tokens}
    return Ready(lambda: {"train": step.seconds()}, {"flops": flops}, step.peak, step.close)


def fits(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each axis and model its points, and the power laws of seconds, bytes and FLOPs."""
    along: dict[tuple[str, str], list[tuple[int, Row]]] = {}
    for group in groups:
        for row in timed(group):
            along.setdefault((group["axis"], row["model"]), []).append((group["value"], row))
    found = []
    for (axis, model), points in along.items():
        x = [value for value, _ in points]
        held = [row["peak_bytes"] for _, row in points]
        y = {
            "seconds": [row["seconds"]["train"]["median"] for _, row in points],
            "bytes": held if all(held) else [],
            "flops": [row["flops"]["train"] for _, row in points],
        }
        powers = {kind: power_law(x, values) if values else None for kind, values in y.items()}
        found.append({"axis": axis, "model": model, "x": x, "y": y, **powers})
    return found


def table(found: Sequence[Mapping[str, Any]]) -> Table:
    """The table of exponents."""
    rows = [[NAMES.get(f["model"], f["model"]), f["axis"], *(_text(f[kind]) for kind in KINDS)] for f in found]
    return Table("Exponents (95 % intervals)", HEADINGS, rows)


def _text(fit: PowerLaw | None) -> str:
    return NONE if fit is None else "{:.2f} ({:.2f} – {:.2f})".format(*fit.exponent)


def main(argv: list[str]) -> int:
    """`anlit benchmark growth`; returns the exit status and raises UserError for the user's mistakes."""
    given = _parser().parse_args(argv)
    check_names("grow", given.grow, AXES)
    check_names("models", given.models, MODELS)
    preset, device = preset_of(given), device_of(given)
    base = changed_size(BASES[preset], given)
    groups = []
    for axis in given.grow:
        for value in given.values or POINTS[preset][axis]:
            one = partial(build, size_at(base, axis, value), device)
            cases = [Case(NAMES.get(model, model), one, {"model": model}) for model in given.models]
            groups.append(Group(f"{axis} = {value}", cases, {"axis": axis, "value": value}))
    prepare_compiler()
    record = Record("growth", argv, given.output, device, size=base.as_json())
    measure(groups, record, given.rounds, given.minutes)
    found = fits(record.values["groups"])
    record.keep(fits=found)
    remarks = notes(record)
    if is_installed("matplotlib"):
        from anlit.benchmarks.growth.plot import plot  # a bare GPU machine need not have matplotlib

        plot(found, record.path("png"))
    else:
        remarks.append("There is no picture, because matplotlib is not installed.")
    record.finish([table(found)], remarks)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("growth", __doc__, "--preset cpu --grow T")
    add_device_options(parser, BASES)
    add = parser.add_argument
    add("--grow", type=names, default=tuple(AXES), metavar="A,…", help="of T, d, L (all)")
    add("--values", type=numbers, metavar="N,…", help="replaces the preset's")
    add("--models", type=names, default=tuple(MODELS), metavar="A,…", help=f"of {', '.join(MODELS)} (all)")
    add_loop_options(parser, 5)
    add_size_options(parser)
    return parser
