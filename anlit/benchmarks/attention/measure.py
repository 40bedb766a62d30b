"""One entrant of `anlit benchmark attention`: its inputs, whether its numbers are right, and its turn."""

import math
from collections.abc import Callable
from functools import partial

import torch

from anlit.attention.backends import BACKENDS
from anlit.attention.mechanism import Mechanism
from anlit.attention.trial import Attend, Inputs, prepare, relative_errors, seconds_of_calls, wrong
from anlit.benchmarks.attention.shapes import Plan, Shape, documents_of
from anlit.benchmarks.cases import Case, Group, NotTimedError, Ready, Row
from anlit.benchmarks.clock import peak_bytes, seconds_of
from anlit.benchmarks.mechanisms import MECHANISMS

AT_LEAST_SECONDS = 0.02
"""A trial repeats the call until it has about this long; shorter ones would measure the clock."""
BACKWARD = 2.5
"""The backward pass has five matrix products where the forward pass has two: it has to recompute the scores."""


def inputs_of(mechanism: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> Inputs:
    """What every entrant with this mechanism computes with, in tensors of its own."""
    copied = MECHANISMS[mechanism].for_layer(shape.heads, shape.width, 0)
    return Inputs(copied, documents_of(shape, device), shape.batch, shape.heads, shape.heads, shape.width, dtype)


def group_of(shape: Shape, plan: Plan, device: torch.device) -> Group:
    """All entrants on one shape. Each is checked against the formula in float64 before it is timed."""
    prepared = partial(build, shape, plan, device)
    cases = [
        Case(f"{mechanism}, {kernel}", prepared, {"mechanism": mechanism, "kernel": kernel})
        for mechanism, kernel in plan.entrants
    ]
    return Group(f"{shape.label}, {shape.batch} × {shape.heads} heads", cases, {"shape": vars(shape)})


def build(shape: Shape, plan: Plan, device: torch.device, rows: list[Row]) -> Ready:
    """Check and prepare the entrant of the last row.

    Args:
        shape: Of its inputs.
        plan: Names their dtype.
        device: The device.
        rows: The last one has `mechanism` and `kernel`.

    Returns:
        Its turn, the errors and the FLOPs of a call, and its peak memory.

    Raises:
        NotTimedError: The kernel cannot compute it, or computes something else.
    """
    mechanism, kernel = rows[-1]["mechanism"], rows[-1]["kernel"]
    given, backend = inputs_of(mechanism, shape, device, plan.dtype), BACKENDS[kernel]
    attend: Attend = backend.attend
    if reason := backend.reason_against(given.mechanism, given.q):
        raise NotTimedError(reason)
    prepare(backend, given.mechanism, given.documents, shape.batch)
    errors = relative_errors(given, attend)
    if reason := wrong(errors, plan.dtype):
        raise NotTimedError(f"it is wrong: {reason}")

    @torch.no_grad()
    def forward_only() -> None:
        given.forward(attend)

    def both() -> None:
        given.both(attend)

    forward = 4.0 * shape.width * shape.heads * _pairs(shape, given.mechanism)
    flops = {"forward": forward, "both": (1 + BACKWARD) * forward}
    calls = {"forward": forward_only, "both": both}
    repeats = {kind: max(1, math.ceil(AT_LEAST_SECONDS / _seconds(call, device))) for kind, call in calls.items()}
    return Ready(
        lambda: {kind: _seconds(call, device, repeats[kind]) for kind, call in calls.items()},
        {"error": errors, "flops": flops},
        lambda: peak_bytes(both, (), device),
    )


def _seconds(call: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """A GPU's own clock measures what runs on it."""
    return (seconds_of if device.type == "cuda" else seconds_of_calls)(call, device, repeats)


def _pairs(shape: Shape, mechanism: Mechanism) -> int:
    """Queries and keys that see each other, over the batch, for one head."""
    documents = documents_of(shape, torch.device("cpu"))
    seen = documents.n_visible(torch.float64, mechanism.window).sum()
    return int(seen) * (1 if shape.documents else shape.batch)
