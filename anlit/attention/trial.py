"""Trials of back ends on random inputs: each is checked against float64, and those that are right are timed in turns.

They run in a thread that is left alone when the time is over, so a kernel or a compiler that hangs stops no run.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from threading import Event, Thread
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anlit.attention.backends import eager, prepare
from anlit.attention.coefficient import Reference, shared_coefficients
from anlit.attention.documents import Documents
from anlit.attention.groups import grouped_product
from anlit.attention.mechanism import Mechanism
from anlit.attention.mechanisms.warm_start import warm_starts
from anlit.attention.selection import AttentionSpec, Selection
from anlit.errors import UserError

TIME_LIMIT_S = 120.0
"""Seconds for all trials of a run."""
UNTRIED = "no time was left to try it"
HANGING_S = 10.0
"""Seconds after that in which a GPU must be free of what the trials left on it."""
ROUNDS, CALLS = 4, 4
"""How often the back ends take turns, and calls in a turn, which queue up on a GPU as in a run. The shortest counts."""
MARGIN = 1.05
"""A back end is taken before one that follows it in the order if it needs at most this many times its seconds."""
BLOCK, MOST_BLOCKS = 128, 16
"""Queries in a block that is checked, and how many blocks are, evenly spaced over the first row."""

BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-11}
"""‖x − reference‖/‖reference‖ at most, of the output and of each gradient."""
LEARNED_BOUNDS = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4, torch.float64: 1e-10}
"""The same for what is learned: its gradient is a sum over all pairs, of which most cancels."""
SMALLEST, NOTHING = 1e-3, 1e-9
"""A reference below 1e-3 of the norm of the output's gradient counts as this large: over 65,536 keys those of q and k
are about 4 times this. One below 1e-9 of the norm of v's gradient is 0, as for q and k where every query sees one key:
a perfect kernel has the difference of two rounded numbers there, so the error is relative to the gradient of v."""

Attend = Callable[[Tensor, Tensor, Tensor, Mechanism, Documents, float], Tensor]


@dataclass(frozen=True)
class Trial:
    """What is to be tried for one kind of attention, with the mechanism of one of its layers."""

    spec: AttentionSpec
    mechanism: Mechanism
    candidates: dict[str, ModuleType]
    """The back ends by name, in the order of preference."""
    default: str
    """What is taken if none can be timed."""


def run_trials(trials: Sequence[Trial], device: torch.device, limit_s: float | None = None) -> list[Selection]:
    """A selection for each trial, in `limit_s` seconds at most (`TIME_LIMIT_S` if None) for all of them.

    What is not tried by then has failed. Random state and gradients stay as they are.

    Raises:
        UserError: A candidate left the GPU unusable.
    """
    limit_s, is_over = TIME_LIMIT_S if limit_s is None else limit_s, Event()
    results = [
        Selection(trial.spec, trial.default, failed=dict.fromkeys(trial.candidates, UNTRIED)) for trial in trials
    ]

    def work() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        for trial, result in zip(trials, results, strict=True):
            _try(trial, result, device, f"it did not end within {limit_s:g} s", is_over)

    worker = Thread(target=work, name="anlit-attention-trials", daemon=True)  # has no grad or autocast mode of ours
    worker.start()
    worker.join(limit_s)
    is_over.set()
    selections = [_selected(trial, result) for trial, result in zip(trials, results, strict=True)]
    if device.type == "cuda":
        check_gpu(selections, device)
        torch.cuda.empty_cache()
    return selections


def _selected(trial: Trial, result: Selection) -> Selection:
    """The first candidate in the order of preference that is about as fast as the fastest.

    It is a copy, because a thread that hangs may go on.
    """
    seconds = dict(result.seconds)
    limit = MARGIN * min(seconds.values(), default=0.0)
    fast = [name for name in trial.candidates if seconds.get(name, math.inf) <= limit]
    return Selection(trial.spec, (*fast, trial.default)[0], seconds, dict(result.wrong), dict(result.failed))


def check_gpu(selections: Sequence[Selection], device: torch.device) -> None:
    """Raise UserError if a candidate broke or still occupies the GPU, which nothing in this process can mend."""
    end, reason = time.monotonic() + HANGING_S, f"it still runs after {HANGING_S:g} s"
    try:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
        while time.monotonic() < end:
            if done.query():
                return
            time.sleep(0.01)
    except RuntimeError as error:
        reason = first_line(error)
    blamed = [f"'{name}' ({why})" for selection in selections for name, why in selection.failed.items()]
    raise UserError(
        f"the GPU cannot be used after a trial of attention back ends ({reason}); these failed: {', '.join(blamed)}: "
        f"set --model.backend {selections[0].backend}"
    )


def first_line(error: Exception) -> str:
    """What an exception of a kernel or a compiler says first, or its type if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _try(trial: Trial, result: Selection, device: torch.device, unfinished: str, is_over: Event) -> None:
    """Check all candidates, then time in turns those that are right, so that other load hits all of them.

    A candidate is in `result.failed` until it is timed or shown to be wrong.
    """
    spec, calls, shortest = trial.spec, dict[str, Callable[[], object]](), dict[str, float]()

    @contextmanager
    def trying(name: str) -> Iterator[None]:
        """Whatever a kernel or a compiler raises, the run goes on without it."""
        result.failed[name] = unfinished
        try:
            yield
            result.failed[name] = "no time was left to time it"
        except Exception as error:
            result.failed[name] = f"it fails: {first_line(error)}"
            calls.pop(name, None)

    @cache
    def given() -> Inputs:  # made by the first candidate for which there is memory
        documents = random_documents(spec.rows, spec.length, spec.document, device)
        sizes = (spec.rows, spec.heads, spec.key_heads, spec.width)
        return Inputs(own_copy(trial.mechanism), documents, *sizes, getattr(torch, spec.dtype))

    for name, backend in trial.candidates.items():
        if is_over.is_set():
            return
        with trying(name):
            attend = torch.compile(backend.attend, dynamic=False, fullgraph=True) if spec.compiled else backend.attend
            prepare(backend, given().mechanism, given().documents, spec.rows)
            calls[name] = partial(given().both, attend)
            reason = wrong(relative_errors(given(), attend), given().q.dtype)
        if name in calls and reason is not None:
            result.wrong[name] = reason
            del result.failed[name], calls[name]
    for name in [*calls] * ROUNDS:
        if is_over.is_set():
            return
        if name in calls:
            with trying(name):
                shortest[name] = min(seconds_of_calls(calls[name], device, CALLS), shortest.get(name, math.inf))
    for name in calls:
        result.seconds[name] = shortest[name]
        del result.failed[name]


class Inputs:
    """q, k, v and the gradient of the output, from a generator of their own; q and k have unit root mean square.

    They are stored (B, T, H or G, D), viewed (B, H or G, T, D). The mechanism should be an `own_copy`.
    """

    def __init__(
        self, mechanism: Mechanism, documents: Documents, rows: int, heads: int, key_heads: int, width: int,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        device = documents.device
        generator = torch.Generator(device).manual_seed(0)

        def draw(n_heads: int) -> Tensor:
            size = (rows, documents.length, n_heads, width)
            return torch.randn(size, generator=generator, device=device).transpose(1, 2)

        q, k, v, probe = (draw(n) for n in (heads, key_heads, key_heads, heads))
        q, k = (x / x.square().mean(-1, keepdim=True).sqrt() for x in (q, k))
        self.q, self.k, self.v = (x.to(dtype).requires_grad_() for x in (q, k, v))
        self.probe = probe.to(dtype)
        self.mechanism, self.documents = mechanism.to(device), documents

    def forward(self, attend: Attend) -> Tensor:
        return attend(self.q, self.k, self.v, self.mechanism, self.documents, 0.0)

    def both(self, attend: Attend, probe: Tensor | None = None) -> list[Tensor]:
        """The output, and the gradients of q, k, v and of what is learned, from `probe` or the inputs' own."""
        out = self.forward(attend)
        leaves = (self.q, self.k, self.v, *self.mechanism.parameters())
        return [out.detach(), *gradients(out, leaves, self.probe if probe is None else probe)]


gradients = partial(torch.autograd.grad, allow_unused=True, materialize_grads=True)
"""Of outputs, by leaves, from the outputs' gradients; 0 for what the outputs do not depend on."""


def relative_errors(given: Inputs, attend: Attend) -> dict[str, float]:
    """Errors of the output, of the gradients of q, k, v, and of what is learned, against the formula in float64.

    The kernel computes all rows, the reference up to 16 blocks of 128 queries of the first row; elsewhere the gradient
    of the output is 0. An error is inf where a number is not finite.
    """
    length = given.documents.length
    n_blocks = math.ceil(length / BLOCK)
    firsts = [BLOCK * round(block) for block in np.linspace(0, n_blocks - 1, min(n_blocks, MOST_BLOCKS))]
    queries = torch.tensor([i for first in firsts for i in range(first, min(first + BLOCK, length))]).to(given.q.device)
    probe = torch.zeros_like(given.probe)
    probe[0, :, queries] = given.probe[0, :, queries]
    out, *gradients = given.both(attend, probe)
    expected = _reference(given, probe, firsts)
    of_v, least = expected[3].norm(), SMALLEST * probe.norm(dtype=torch.float64)
    values = {}
    for number, (result, reference) in enumerate(zip([out[:1, :, queries], *gradients], expected, strict=True)):
        norm, rows = reference.norm(), len(reference)  # of the other rows the gradients are 0
        difference = torch.stack([(result[:rows].double() - reference).norm(), result[rows:].norm(dtype=torch.float64)])
        error = (difference.norm() / (torch.maximum(norm, least) if norm > NOTHING * of_v else of_v)).item()
        name = ("out", "q", "k", "v")[number] if number < 4 else f"learned {number - 4}"
        values[name] = error if math.isfinite(error) else math.inf
    return values


def _reference(given: Inputs, probe: Tensor, firsts: Sequence[int]) -> list[Tensor]:
    """The output of the blocks of queries, (1, H, queries, D), and the gradients, of the first row in float64."""
    mechanism, documents = copy.deepcopy(given.mechanism).double(), given.documents
    row = Documents(None if documents.ids is None else documents.ids[:1], documents.length, documents.device)
    q, k, v = (x[:1].detach().double().requires_grad_() for x in (given.q, given.k, given.v))
    leaves = (q, k, v, *mechanism.parameters())
    outputs, totals = [], [torch.zeros_like(leaf) for leaf in leaves]
    for first in firsts:
        end = min(first + BLOCK, documents.length)
        weights = eager.logits(q, k, mechanism, row, first, end).softmax(-1)
        out = grouped_product(weights, v[..., :end, :])
        torch._foreach_add_(totals, gradients(out, leaves, probe[:1, :, first:end].double()))
        outputs.append(out.detach())
    return [torch.cat(outputs, -2), *totals]


def wrong(errors: dict[str, float], dtype: torch.dtype) -> str | None:
    """What is over its bound; None if nothing is."""
    bounds = {name: (LEARNED_BOUNDS if name.startswith("learned") else BOUNDS)[dtype] for name in errors}
    over = {name: error for name, error in errors.items() if not error <= bounds[name]}
    return f"relative error {max(over.values()):.1e} of {', '.join(over)}" if over else None


def seconds_of_calls(call: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Mean seconds of a call; on one CPU thread those of the processor, in which other programs have no part."""
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    begin = clock()
    for _ in range(repeats):
        call()
    wait()
    return (clock() - begin) / repeats


def random_documents(rows: int, length: int, mean: float | None, device: torch.device) -> Documents:
    """Documents of mixed length, always the same ones; one a row if `mean`, their tokens on average, is None.

    What a loader makes on the host is there.
    """
    if mean is None:
        return Documents(None, length, device)
    starts = torch.rand(rows, length, generator=torch.Generator().manual_seed(1)) < 1 / mean
    ids = starts.long().cumsum(1)
    on_host = Documents(ids, length, torch.device("cpu"))
    longest = int(on_host.cu_seqlens.diff().max())
    return Documents(ids.to(device), length, device, on_host.cu_seqlens, longest)


def own_copy(mechanism: Mechanism) -> Mechanism:
    """A copy on the CPU with initial values; it shares no coefficient and is never sharded."""
    learned = [parameter for part in (mechanism, *shared_coefficients(mechanism)) for parameter in part.parameters()]
    own: dict[int, Any] = {id(parameter): nn.Parameter(torch.zeros(parameter.shape)) for parameter in learned}
    copied = copy.deepcopy(mechanism, own)
    for module in [*copied.modules()]:
        for name, part in module.named_children():
            if isinstance(part, Reference):
                setattr(module, name, part.coefficient)
    for module in copied.modules():
        getattr(module, "reset_parameters", lambda: None)()
    for part in warm_starts(copied):
        part.share.fill_(0.5)  # at 0 every mechanism is plain attention
    return copied.requires_grad_()
