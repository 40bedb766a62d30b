"""The measurements of `anlit benchmark step`: build and check every variant, then let them take turns."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from anlit.benchmarks.options import say
from anlit.benchmarks.peers.training_step import PEERS
from anlit.benchmarks.process import ProcessError
from anlit.benchmarks.rates import matrix_peak, prepare_compiler
from anlit.benchmarks.record import Record
from anlit.benchmarks.step.entrants import Entrant, build, same_work
from anlit.benchmarks.step.plan import BASE, Plan, Variant
from anlit.benchmarks.turns import alternate

CHECKED_STEPS = 3
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 1e-2}
"""Relative, between the losses of one architecture in its first steps, however it is run."""
FLOAT8_TOLERANCE = 0.02
BUILDING = 0.7
"""Share of the time in which variants are built, compiled and checked; the rest is for the rounds."""
FAILURES = (ProcessError, RuntimeError, ImportError, AssertionError, ValueError, TypeError, AttributeError)

Row = dict[str, Any]


def measure(
    plan: Plan, device: torch.device, minutes: float, documents: bool, python: str | None, record: Record
) -> None:
    """Every variant of the plan, into the record.

    It gets `rows`, one for each variant, with `reason` where it was not timed; `rounds` that were done; and
    `peak_flops_per_second` of matrix products, the best seen before and between the rounds.

    Args:
        minutes: No variant is built later than `BUILDING` of this, and no round begun later.
    """
    began = time.monotonic()
    prepare_compiler()
    peak = matrix_peak(device, plan.size.dtype)
    say(f"{peak / 1e12:.3g} TFLOP/s in a product of matrices")
    rows: list[Row] = []
    running: list[tuple[Row, Entrant]] = []
    for variant in plan.variants():
        row: Row = {**vars(variant), "label": variant.label, "mode": variant.mode, "reason": None}
        row["peer"] = variant.model in PEERS
        rows.append(row)
        if time.monotonic() - began > BUILDING * 60 * minutes:
            row["reason"] = f"no time was left after {BUILDING * minutes:.1f} minutes"
        else:
            say(f"building and checking {variant.label}")
            entrant = _built(variant, row, rows, plan, device, documents, python)
            if entrant is not None:
                running.append((row, entrant))
        if row["reason"] is not None:
            say(f"{variant.label} is left out: {row['reason']}")
        record.keep(rows=rows, rounds=0, peak_flops_per_second=peak)
    _take_turns(running, plan, device, began + 60 * minutes, record)
    for row, entrant in running:
        row["peak_bytes"] = entrant.peak()
        entrant.close()
    record.keep(rows=rows)


def _built(
    variant: Variant,
    row: Row,
    rows: list[Row],
    plan: Plan,
    device: torch.device,
    documents: bool,
    python: str | None,
) -> Entrant | None:
    """The variant after its first steps; None, and the reason in its row, if it fails or computes something else."""
    entrant = None
    try:
        began = time.monotonic()
        entrant = build(variant, plan.size, device, documents, python)
        row.update(entrant.described)
        row["losses"] = [entrant.loss() for _ in range(CHECKED_STEPS)]
        row["reason"] = reason_against(row, rows, plan)
        if row["reason"] is None:
            for kind in kinds_of(row, plan):
                entrant.seconds(kind, 2)
        row["first_seconds"] = time.monotonic() - began
    except FAILURES as error:
        lines = str(error).splitlines() or [repr(error)]
        row["reason"] = f"it fails: {lines[0][:200]}"
    if row["reason"] is not None and entrant is not None:
        entrant.close()
        return None
    return entrant


def kinds_of(row: Row, plan: Plan) -> list[str]:
    """What is timed of a variant: peers make no inference."""
    return [kind for kind in plan.kinds if not (row["peer"] and kind == "infer")]


def reason_against(row: Row, rows: list[Row], plan: Plan) -> str | None:
    """Why a variant's numbers are wrong, if they are.

    Its first losses have to be those of the same architecture as it ran before. A peer has to do the work of our GPT,
    and to begin near log V as every network does that knows nothing.
    """
    losses = row["losses"]
    if not all(math.isfinite(loss) for loss in losses):
        return f"its losses are {losses}"
    if row["peer"]:
        start = math.log(plan.size.vocab_size)
        if abs(losses[0] / start - 1) > 0.1:
            return f"it is wrong: its first loss is {losses[0]:.3f}, not about {start:.2f}"
        ours = next((other for other in rows if other["model"] == BASE and other["reason"] is None), None)
        if ours is not None and (reason := same_work(row, ours)):
            return reason
    same = ("model", "mechanism")
    first = next(other for other in rows if all(other[key] == row[key] for key in same) and other.get("losses"))
    allowed = FLOAT8_TOLERANCE if row["compiled"] == "float8" else TOLERANCE[plan.size.dtype]
    if any(abs(mine / its - 1) > allowed for mine, its in zip(losses, first["losses"], strict=True)):
        return f"it is wrong: its first losses are {losses}, those of {first['label']} {first['losses']}"
    return None


def _take_turns(
    running: list[tuple[Row, Entrant]], plan: Plan, device: torch.device, deadline: float, record: Record
) -> None:
    """Adds `seconds` by kind to the rows after each round, and the best peak to the record."""
    calls: dict[tuple[int, str], Callable[[], float]] = {
        (number, kind): partial(entrant.seconds, kind, plan.repeats)
        for number, (row, entrant) in enumerate(running)
        for kind in kinds_of(row, plan)
    }

    def after_round(seconds: dict[tuple[int, str], list[float]]) -> None:
        for (number, kind), values in seconds.items():
            running[number][0].setdefault("seconds", {})[kind] = list(values)
            done = len(values)
        peak = max(record.values["peak_flops_per_second"], matrix_peak(device, plan.size.dtype))
        record.keep(rounds=done, peak_flops_per_second=peak)
        say(f"round {done} of {plan.rounds} is done")

    if calls:
        alternate(calls, plan.rounds, deadline=deadline, after_round=after_round)
