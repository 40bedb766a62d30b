"""One entrant of `anlit benchmark attention`: its inputs, whether its numbers are right, and its turn."""

import math
from functools import partial

import torch
from torch import Tensor

from anlit.attention.backends import BACKENDS, eager
from anlit.attention.mechanism import Mechanism
from anlit.benchmarks.attention.kernels import MECHANISMS, attend_by, reason_against
from anlit.benchmarks.attention.shapes import Plan, Shape, documents_of
from anlit.benchmarks.cases import Case, Group, NotTimedError, Ready, Row
from anlit.benchmarks.peers.clock import peak_bytes, seconds_of

BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""‖x − reference‖/‖reference‖ at most, of the output and of each gradient."""
LEARNED_BOUNDS = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4}
"""The same of what is learned: a sum over all pairs, of which most cancels."""
AT_LEAST_SECONDS = 0.02
"""A trial repeats the call until it has about this long; shorter ones would measure the clock."""
BACKWARD = 2.5
"""The backward pass has five matrix products where the forward pass has two: it has to recompute the scores."""


class Inputs:
    """What one entrant computes with: q, k, v of its own, the documents, the gradient of the output."""

    def __init__(self, mechanism: str, kernel: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator(device).manual_seed(0)
        size = (shape.batch, shape.heads, shape.length, shape.width)
        q, k, v, probe = (torch.randn(size, generator=generator, device=device) for _ in range(4))
        q, k = (x / x.square().mean(-1, keepdim=True).sqrt() for x in (q, k))
        self.probe = probe.to(dtype)
        self.q, self.k, self.v = (x.to(dtype).requires_grad_() for x in (q, k, v))
        self.mechanism: Mechanism = MECHANISMS[mechanism].for_layer(shape.heads, shape.width, 0).to(device)
        self.documents = documents_of(shape, device)
        self.attend = attend_by(kernel)
        prepare = getattr(BACKENDS.get(kernel), "prepare", None)
        if prepare is not None:
            prepare(self.mechanism, self.documents, shape.batch)

    def forward(self) -> Tensor:
        return self.attend(self.q, self.k, self.v, self.mechanism, self.documents, 0.0)

    def forward_only(self) -> None:
        with torch.no_grad():
            self.forward()

    def both(self) -> tuple[Tensor, ...]:
        """The output, and the gradients of q, k, v and of what is learned."""
        out = self.forward()
        leaves = (self.q, self.k, self.v, *self.mechanism.parameters())
        return out.detach(), *torch.autograd.grad(out, leaves, self.probe)

    def discard_both(self) -> None:
        """Both passes; what they return is freed at once."""
        self.both()


def group_of(shape: Shape, plan: Plan, device: torch.device) -> Group:
    """All entrants on one shape. Each is checked against eager attention in a higher precision before it is timed."""
    references: dict[str, tuple[Tensor, ...]] = {}
    build = partial(_build, shape, plan, device, references)
    cases = [
        Case(f"{mechanism}, {kernel}", build, {"mechanism": mechanism, "kernel": kernel})
        for mechanism, kernel in plan.entrants
    ]
    return Group(f"{shape.label}, {shape.batch} × {shape.heads} heads", cases, {"shape": vars(shape)})


def _build(
    shape: Shape, plan: Plan, device: torch.device, references: dict[str, tuple[Tensor, ...]], rows: list[Row]
) -> Ready:
    mechanism, kernel = rows[-1]["mechanism"], rows[-1]["kernel"]
    given = Inputs(mechanism, kernel, shape, device, plan.dtype)
    if reason := reason_against(kernel, given.mechanism, given.q, shape.documents):
        raise NotTimedError(reason)
    if mechanism not in references:
        references.clear()  # those of one mechanism stand together, and a reference is large
        references[mechanism] = _reference(mechanism, shape, device, plan.dtype)
    errors = _errors(given.both(), references[mechanism])
    if reason := _wrong(errors, plan.dtype):
        raise NotTimedError(reason)
    forward = 4.0 * shape.width * shape.heads * _pairs(shape, given.mechanism)
    flops = {"forward": forward, "both": (1 + BACKWARD) * forward}
    calls = {"forward": given.forward_only, "both": given.discard_both}
    repeats = {kind: max(1, math.ceil(AT_LEAST_SECONDS / seconds_of(call, device))) for kind, call in calls.items()}
    return Ready(
        lambda: {kind: seconds_of(call, device, repeats[kind]) for kind, call in calls.items()},
        {"error": errors, "flops": flops},
        lambda: peak_bytes(given.discard_both, (), device),
    )


def _reference(mechanism: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The eager back end with the same numbers in float32, or in float64 for what itself is float32."""
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    given = Inputs(mechanism, "eager", shape, device, dtype)
    given.mechanism.to(wide)
    given.q, given.k, given.v = (x.detach().to(wide).requires_grad_() for x in (given.q, given.k, given.v))
    given.probe = given.probe.to(wide)
    given.attend = eager.attend
    return given.both()


def _errors(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> dict[str, float]:
    names = ["out", "q", "k", "v", *(f"learned {n}" for n in range(len(found) - 4))]
    pairs = zip(found, expected, strict=True)
    values = [((one.to(other.dtype) - other).norm() / other.norm()).item() for one, other in pairs]
    return {name: value if math.isfinite(value) else math.inf for name, value in zip(names, values, strict=True)}


def _wrong(errors: dict[str, float], dtype: torch.dtype) -> str | None:
    """What is over its bound; None if nothing is."""
    bounds = {name: (LEARNED_BOUNDS if name.startswith("learned") else BOUNDS)[dtype] for name in errors}
    wrong = {name: error for name, error in errors.items() if not error <= bounds[name]}
    return f"it is wrong: relative error {max(wrong.values()):.1e} of {', '.join(wrong)}" if wrong else None


def _pairs(shape: Shape, mechanism: Mechanism) -> int:
    """Queries and keys that see each other, over the batch, for one head."""
    documents = documents_of(shape, torch.device("cpu"))
    seen = documents.n_visible(torch.float64, mechanism.window).sum()
    return int(seen) * (1 if shape.documents else shape.batch)
