"""The measurements of `anlit benchmark attention`: first whether the numbers are right, then the entrants in turn."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anlit.attention.backends import BACKENDS, eager
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism
from anlit.benchmarks.attention.cases import MECHANISMS, Entrant, Plan, Shape, kernel, reason_against
from anlit.benchmarks.options import say
from anlit.benchmarks.peers.clock import peak_bytes, seconds_of
from anlit.benchmarks.turns import alternate, quartiles, timed

BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""‖x − reference‖/‖reference‖ at most, of the output and of each gradient."""
LEARNED_BOUNDS = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4}
"""The same of what is learned: a sum over all pairs, of which most cancels."""
MEAN_DOCUMENT = 1 / 8
"""Mean length of a document, in T: lengths are drawn from an exponential distribution, some of a few tokens."""
AT_LEAST_SECONDS = 0.02
"""A trial repeats the call until it has about this long; shorter ones would measure the clock."""
BACKWARD = 2.5
"""The backward pass has five matrix products where the forward pass has two: it has to recompute the scores."""


class Inputs:
    """What one entrant computes with: q, k, v of its own, the documents, the gradient of the output."""

    def __init__(self, entrant: Entrant, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator(device).manual_seed(0)
        size = (shape.batch, shape.heads, shape.length, shape.width)
        q, k, v, probe = (torch.randn(size, generator=generator, device=device) for _ in range(4))
        q, k = (x / x.square().mean(-1, keepdim=True).sqrt() for x in (q, k))
        self.probe = probe.to(dtype)
        self.q, self.k, self.v = (x.to(dtype).requires_grad_() for x in (q, k, v))
        self.mechanism: Mechanism = MECHANISMS[entrant.mechanism].for_layer(shape.heads, shape.width, 0).to(device)
        self.documents = documents_of(shape, device)
        self.attend = kernel(entrant.kernel)
        prepare = getattr(BACKENDS.get(entrant.kernel), "prepare", None)
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


def documents_of(shape: Shape, device: torch.device) -> Documents:
    """One document a row, or many of mixed length, the same for every entrant."""
    if not shape.documents:
        return Documents(None, shape.length, device)
    generator = torch.Generator().manual_seed(1)
    starts = torch.rand(shape.batch, shape.length, generator=generator) < 1 / (MEAN_DOCUMENT * shape.length)
    ids = starts.long().cumsum(1)
    on_host = Documents(ids, shape.length, torch.device("cpu"))
    longest = int(on_host.cu_seqlens.diff().max())
    return Documents(ids.to(device), shape.length, device, on_host.cu_seqlens, longest)


def measure(shape: Shape, plan: Plan, device: torch.device, peak: float) -> dict[str, Any]:
    """All entrants on one shape; one that cannot take part, fails or computes something else has the reason instead."""
    rows: list[dict[str, Any]] = []
    running: list[tuple[dict[str, Any], Inputs]] = []
    references: dict[str, tuple[Tensor, ...]] = {}
    for entrant in plan.entrants:
        row: dict[str, Any] = {"mechanism": entrant.mechanism, "kernel": entrant.kernel, "label": entrant.label}
        rows.append(row)
        try:
            given = Inputs(entrant, shape, device, plan.dtype)
            row["reason"] = reason_against(entrant, given.mechanism, given.q, shape.documents)
            if row["reason"] is None:
                if entrant.mechanism not in references:
                    references = {entrant.mechanism: _reference(entrant, shape, device, plan.dtype)}
                row["error"] = _errors(given.both(), references[entrant.mechanism])
                row["bound"], row["learned_bound"] = BOUNDS[plan.dtype], LEARNED_BOUNDS[plan.dtype]
                row["reason"] = _wrong(row["error"], plan.dtype)
        except (RuntimeError, ImportError, AssertionError) as error:  # no memory, or a kernel that does not run here
            row["reason"] = f"it fails: {str(error).splitlines()[0][:200] if str(error) else type(error).__name__}"
        if row["reason"] is None:
            running.append((row, given))
        else:
            say(f"{shape.label}: {entrant.label} is left out, {row['reason']}")
    references.clear()
    _take_turns(running, plan.rounds, device)
    for row, given in running:
        row["flops"] = {"forward": 4.0 * shape.width * shape.heads * _pairs(shape, given.mechanism)}
        row["flops"]["both"] = (1 + BACKWARD) * row["flops"]["forward"]
        for kind, flops in row["flops"].items():
            row[f"{kind}_flops_per_second"] = flops / row[kind]["median"]
            row[f"{kind}_of_peak"] = row[f"{kind}_flops_per_second"] / peak
    return {"shape": {**vars(shape), "label": shape.label}, "entrants": rows}


def _reference(entrant: Entrant, shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The eager back end with the same numbers in float32, or in float64 for what itself is float32."""
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    given = Inputs(Entrant(entrant.mechanism, "eager"), shape, device, dtype)
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


def _take_turns(running: list[tuple[dict[str, Any], Inputs]], rounds: int, device: torch.device) -> None:
    """Adds seconds of the forward pass and of both passes, and the bytes of both, to the rows."""
    calls: dict[tuple[int, str], Callable[[], Any]] = {}
    for number, (_, given) in enumerate(running):
        calls[number, "forward"], calls[number, "both"] = given.forward_only, partial(_nothing_kept, given)
    entrants = {name: timed(call, device, _repeats(call, device)) for name, call in calls.items()}
    for (number, kind), values in alternate(entrants, rounds).items():
        running[number][0][kind] = quartiles(values)
    for number, (row, _) in enumerate(running):
        row["peak_bytes"] = peak_bytes(calls[number, "both"], (), device)


def _nothing_kept(given: Inputs) -> None:
    given.both()


def _repeats(call: Callable[[], Any], device: torch.device) -> int:
    call()
    return max(1, math.ceil(AT_LEAST_SECONDS / seconds_of(call, device)))


def _pairs(shape: Shape, mechanism: Mechanism) -> int:
    """Queries and keys that see each other, over the batch, for one head."""
    documents = documents_of(shape, torch.device("cpu"))
    seen = documents.n_visible(torch.float64, mechanism.window).sum()
    return int(seen) * (1 if shape.documents else shape.batch)
