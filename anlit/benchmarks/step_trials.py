"""The measurements of `anlit benchmark step`: build and check every variant, then let them take turns."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from anlit.benchmarks.attention_trials import matrix_peak
from anlit.benchmarks.step_entrants import Entrant, build, same_work
from anlit.benchmarks.step_size import Plan, Variant
from anlit.benchmarks.step_worker import PEERS

CHECKED_STEPS = 3
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 1e-2}
"""Relative, between the losses of one architecture in its first steps, however it is run."""
FLOAT8_TOLERANCE = 0.02
BUILDING = 0.7
"""Share of the time in which variants are built, compiled and checked; the rest is for the rounds."""
FAILURES = (RuntimeError, ImportError, AssertionError, ValueError, TypeError, AttributeError)

Say = Callable[[str], None]
Row = dict[str, Any]


def measure(
    plan: Plan, device: torch.device, minutes: float, documents: bool, python: str | None, say: Say
) -> dict[str, Any]:
    """Every variant of the plan.

    Args:
        minutes: No variant is built later than `BUILDING` of this, and no round begun later.

    Returns:
        `rows`, one for each variant, with `reason` where it was not timed; `rounds` that were done;
        `peak_flops_per_second` of matrix products, the best seen before, between and after the rounds.
    """
    began = time.monotonic()
    _prepare_compiler()
    peak = matrix_peak(device, plan.size.dtype)
    say(f"{peak / 1e12:.3g} TFLOP/s in a product of matrices")
    rows: list[Row] = []
    running: list[tuple[Row, Entrant]] = []
    for variant in plan.variants():
        row: Row = {**vars(variant), "label": variant.label, "peer": variant.model in PEERS, "reason": None}
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
    done, peak = _take_turns(running, plan, device, began + 60 * minutes, peak, say)
    for row, entrant in running:
        row["peak_bytes"] = entrant.answer({"do": "peak", "kind": "train"})["bytes"]
        entrant.close()
    return {"rows": rows, "rounds": done, "peak_flops_per_second": peak}


def _prepare_compiler() -> None:
    """Blocks of several models share their code, and each model and each kind of pass is a compilation of its own."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # or the rest would run uncompiled, and be timed


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
        row["losses"] = [entrant.answer({"do": "loss"})["loss"] for _ in range(CHECKED_STEPS)]
        row["reason"] = reason_against(row, rows, plan)
        if row["reason"] is None:
            for kind in kinds_of(row, plan):
                entrant.answer({"do": "time", "kind": kind, "repeats": 2})
        row["first_seconds"] = time.monotonic() - began
    except FAILURES as error:
        text = str(error).splitlines()
        row["reason"] = f"it fails: {text[0][:200] if text else type(error).__name__}"
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
    if not all(loss is not None and math.isfinite(loss) for loss in losses):
        return f"its losses are {losses}"
    if row["peer"]:
        start = math.log(plan.size.vocab_size)
        if abs(losses[0] / start - 1) > 0.1:
            return f"it is wrong: its first loss is {losses[0]:.3f}, not about {start:.2f}"
        ours = next((other for other in rows if other["model"] == "GPT" and other["reason"] is None), None)
        if ours is not None and (reason := same_work(row, ours)):
            return reason
    same = ("model", "mechanism")
    first = next(other for other in rows if all(other[key] == row[key] for key in same) and other.get("losses"))
    allowed = FLOAT8_TOLERANCE if row["compiled"] == "float8" else TOLERANCE[plan.size.dtype]
    if any(abs(mine / its - 1) > allowed for mine, its in zip(losses, first["losses"], strict=True)):
        return f"it is wrong: its first losses are {losses}, those of {first['label']} {first['losses']}"
    return None


def _take_turns(
    running: list[tuple[Row, Entrant]], plan: Plan, device: torch.device, end: float, peak: float, say: Say
) -> tuple[int, float]:
    """Every variant once in each round, each round begins with another; adds `seconds` by kind to the rows.

    Returns:
        Rounds that all did, and the best peak.
    """
    seconds: list[dict[str, list[float]]] = [{} for _ in running]
    for turn in range(plan.rounds):
        if turn and time.monotonic() > end:
            break
        say(f"round {turn + 1} of {plan.rounds}")
        peak = max(peak, matrix_peak(device, plan.size.dtype))
        for place in range(len(running)):
            number = (turn + place) % len(running)
            row, entrant = running[number]
            for kind in kinds_of(row, plan):
                request = {"do": "time", "kind": kind, "repeats": plan.repeats}
                seconds[number].setdefault(kind, []).append(entrant.answer(request)["seconds"])
    for (row, _), of_one in zip(running, seconds, strict=True):
        row["seconds"] = of_one
    return len(seconds[0][plan.kinds[0]]) if running else 0, peak
