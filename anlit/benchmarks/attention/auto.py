"""`anlit benchmark attention --auto`: what `backend: auto` takes, and what is fastest, each measured for itself.

A cell is a mechanism, a length, and packed documents or not. In each, a trial as at the start of a run (of the demo's
length, without the cache) chooses; then every back end that can do it takes turns.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from anlit.attention.backends import BACKENDS
from anlit.attention.choice.choose import Wanted, try_all
from anlit.attention.choice.inputs import own_copy
from anlit.attention.choice.kind import Kind, form_of, name_of
from anlit.attention.choice.process import TrialProcess
from anlit.attention.choice.trial import Request
from anlit.benchmarks.attention.measure import group_of
from anlit.benchmarks.attention.shapes import MEAN_DOCUMENT, Plan, Shape
from anlit.benchmarks.cases import Group, timed
from anlit.benchmarks.mechanisms import MECHANISMS
from anlit.benchmarks.record import Table
from anlit.reporting.table import NONE

CHOSEN_FOR = ("plain", "log-n", "alibi", "scale-invariant", "window-scale-invariant")
LENGTHS = (256, 2048)
N_LAYERS, N_PASSES = 4, 1600.0
"""Of a run of the demo: 400 steps of 4 layers."""
AS_GOOD = 1.05
"""A back end that takes at most this many times the fastest's time counts as the fastest: runs differ by as much."""


def cells(plan: Plan, device: torch.device) -> Iterator[Group]:
    """A group for each cell: its back ends, and under `auto` the trial's seconds by back end and what it has chosen."""
    with TrialProcess() as process:
        for shape in replace(plan, widths=plan.widths[:1]).shapes():
            for mechanism in CHOSEN_FOR:
                yield _cell(mechanism, shape, plan, device, process)


def _cell(mechanism: str, shape: Shape, plan: Plan, device: torch.device, process: TrialProcess) -> Group:
    layer = MECHANISMS[mechanism].for_layer(shape.heads, shape.width, 0)
    document = int(MEAN_DOCUMENT * shape.length) if shape.documents else None
    sizes = (shape.batch, shape.heads, shape.heads, shape.length, shape.width)
    compiled = device.type != "cpu"
    kind = Kind(form_of(layer), *sizes, name_of(plan.dtype), document, 0.0, compiled)
    wanted = Wanted(kind, own_copy(layer), N_LAYERS, N_PASSES)
    able = wanted.able(device)
    request = Request(kind, wanted.mechanism, device, N_LAYERS, wanted.rounds(len(able)))
    seconds = try_all(request, able, process).seconds
    chosen = min(seconds, key=seconds.__getitem__) if seconds else None
    entrants = tuple((mechanism, name) for name in able)
    group = group_of(shape, replace(plan, entrants=entrants), device)
    facts = {**group.facts, "auto": {"chosen": chosen, "seconds": seconds}}
    return replace(
        group, title=f"{mechanism}, T {shape.length}, {'documents' if shape.documents else 'dense'}", facts=facts
    )


def table(groups: list[dict[str, Any]]) -> tuple[Table, str]:
    """A row for each cell, and in how many of them auto has taken the fastest."""
    shown = [name for name in BACKENDS if any(row["kernel"] == name for group in groups for row in timed(group))]
    rows, right = [], 0
    for group in groups:
        medians = {row["kernel"]: row["seconds"]["both"]["median"] for row in timed(group)}
        chosen, best = group["auto"]["chosen"], min(medians, key=medians.__getitem__, default=None)
        times = medians[chosen] / medians[best] if chosen in medians and best is not None else float("inf")
        right += times <= AS_GOOD
        cells_of_row = [f"{1e3 * medians[name]:.3g}" if name in medians else NONE for name in shown]
        rows.append([group["title"], *cells_of_row, chosen or NONE, best or NONE, f"{times:.2f}"])
    head = ["", *(f"{name}, ms" for name in shown), "chosen", "fastest", "chosen ÷ fastest"]
    limit = f"at most {AS_GOOD:g} times the fastest's time"
    return Table(
        "Forward and backward", head, rows
    ), f"auto took the fastest ({limit}) in {right} of {len(rows)} cells."
