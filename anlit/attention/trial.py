"""Trials of back ends on random inputs: each is checked against float64, and those that are right are timed in turns.

They run in a thread that is left alone when the time is over, so a kernel or a compiler that hangs stops no run.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anlit.attention.backends import BACKENDS, BackendName, eager, prepare
from anlit.attention.coefficient import shared_coefficients
from anlit.attention.documents import Documents
from anlit.attention.groups import grouped_product
from anlit.attention.mechanism import Mechanism
from anlit.attention.mechanisms.warm_start import warm_starts
from anlit.attention.selection import AttentionSpec, Selection
from anlit.errors import UserError
from anlit.layers.sharded import full_tensor

TIME_LIMIT_S, HANGING_S = 120.0, 10.0
"""Seconds for all trials of a run, and those after which a GPU must be free of what they left on it."""
UNTRIED, UNFINISHED = "no time was left to try it", "it did not end in time"
ROUNDS, CALLS = 4, 4
"""How often the back ends take turns, and calls in a turn, which queue up on a GPU as in a run. The shortest counts."""
BLOCK, MOST_BLOCKS = 128, 16
"""Queries in a block that is checked, and how many blocks are, evenly spaced over the first row."""

BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-11}
"""‖x − reference‖/‖reference‖ at most, of the output and of each gradient."""
LEARNED_BOUNDS = {
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
    torch.float32: 1e-4,
    torch.float64: 1e-10,
}
"""The same for what is learned: its gradient is a sum over all pairs, of which most cancels."""
SMALLEST, NOTHING = 1e-3, 1e-9
"""A reference below 1e-3 of the norm of the output's gradient counts as this large: over 65,536 keys those of q and k
are about 4 times this. One below 1e-9 of the norm of v's gradient is 0, as for q and k where every query sees one key:
the error is relative to the gradient of v there."""

Attend = Callable[[Tensor, Tensor, Tensor, Mechanism, Documents, float], Tensor]


@dataclass
class Trial:
    """What is to be tried for one kind of attention, with the mechanism of one of its layers, and the results."""

    spec: AttentionSpec
    mechanism: Mechanism
    candidates: list[BackendName]
    default: BackendName  # if none can be timed
    wrong: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    turns: dict[str, list[float]] = field(default_factory=dict)  # the seconds of each

    def run(self, device: torch.device, is_over: Event) -> None:
        """Check all candidates, then time in turns those that are right, so that other load hits all of them. Whatever
        a kernel or a compiler raises, the run goes on without it."""
        spec, calls = self.spec, dict[str, Callable[[], object]]()

        @cache
        def given() -> Inputs:  # made by the first candidate for which there is memory
            documents = random_documents(spec.rows, spec.length, spec.document, device)
            sizes = spec.rows, spec.heads, spec.key_heads, spec.width
            return Inputs(self.mechanism, documents, *sizes, getattr(torch, spec.dtype))

        def check(name: str) -> None:
            backend = BACKENDS[name]
            attend = (
                torch.compile(backend.attend, dynamic=False, fullgraph=True)
                if spec.compiled
                else backend.attend
            )
            prepare(backend, self.mechanism, given().documents, spec.rows)
            if reason := wrong(relative_errors(given(), attend), given().q.dtype):
                self.wrong[name] = reason
            else:
                calls[name] = partial(given().both, attend)

        def take_turn(name: str) -> None:
            self.turns.setdefault(name, []).append(seconds_of_calls(calls[name], device, CALLS))

        for step in (check, *[take_turn] * ROUNDS):
            for name in self.candidates if step is check else [*calls]:
                if is_over.is_set():
                    return
                self.failed[name] = UNFINISHED
                try:
                    step(name)
                    self.failed[name] = UNTRIED
                except Exception as error:
                    self.failed[name] = f"it fails: {first_line(error)}"
                    calls.pop(name, None)

    def selection(self) -> Selection:
        """The fastest of those that took all turns."""
        timed = [name for name in self.candidates if len(self.turns.get(name, ())) == ROUNDS]
        seconds: dict[str, float] = {name: min(self.turns[name]) for name in timed}
        tried = {*timed, *self.wrong}
        failed: dict[str, str] = {
            n: self.failed.get(n, UNTRIED) for n in self.candidates if n not in tried
        }
        fastest = min(timed, key=seconds.__getitem__, default=self.default)
        return Selection(self.spec, fastest, seconds, dict(self.wrong), failed)


def run_trials(
    trials: Sequence[Trial], device: torch.device, limit_s: float = TIME_LIMIT_S
) -> list[Selection]:
    """A selection for each trial, in `limit_s` seconds for all of them. What is not tried by then has failed. Raises
    UserError if a candidate left the GPU unusable."""
    is_over = Event()

    def work() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        for trial in trials:
            trial.run(device, is_over)

    worker = Thread(
        target=work, name="anlit-attention-trials", daemon=True
    )  # has no grad or autocast mode of ours
    worker.start()
    worker.join(limit_s)
    is_over.set()
    selections = [trial.selection() for trial in trials]
    if device.type == "cuda":
        check_gpu(selections, device)
        torch.cuda.empty_cache()
    return selections


def check_gpu(selections: Sequence[Selection], device: torch.device) -> None:
    """Raise UserError if a candidate broke or still occupies the GPU, which nothing in this process can mend."""
    end = time.monotonic() + HANGING_S
    try:
        done = torch.cuda.current_stream(device).record_event()
        while not done.query():
            if time.monotonic() > end:
                raise RuntimeError(f"it still runs after {HANGING_S:g} s")
            time.sleep(0.01)
    except RuntimeError as error:
        failed = [
            f"'{name}' ({why})"
            for selection in selections
            for name, why in selection.failed.items()
        ]
        raise UserError(
            f"the GPU cannot be used after a trial of attention back ends ({first_line(error)}); these failed: "
            f"{', '.join(failed)}: set --model.backend {selections[0].backend}"
        ) from error


def first_line(error: Exception) -> str:
    """What an exception of a kernel or a compiler says first, or its type if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class Inputs:
    """q, k, v and the gradient of the output, random, stored (B, T, H or G, D), viewed (B, H or G, T, D); q and k have
    unit root mean square."""

    def __init__(
        self, mechanism: Mechanism, documents: Documents, rows: int, heads: int, key_heads: int, width: int,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        device = documents.device
        generator = torch.Generator(device).manual_seed(0)
        q, k, v, probe = (
            torch.randn(
                rows, documents.length, n, width, generator=generator, device=device
            ).transpose(1, 2)
            for n in (heads, key_heads, key_heads, heads)
        )
        q, k = (x / x.square().mean(-1, keepdim=True).sqrt() for x in (q, k))
        self.q, self.k, self.v = (x.to(dtype).requires_grad_() for x in (q, k, v))
        self.probe, self.mechanism, self.documents = (
            probe.to(dtype),
            mechanism.to(device),
            documents,
        )

    def forward(self, attend: Attend) -> Tensor:
        return attend(self.q, self.k, self.v, self.mechanism, self.documents, 0.0)

    def both(self, attend: Attend, probe: Tensor | None = None) -> list[Tensor]:
        """The output, and the gradients of q, k, v and of what is learned, from `probe` or the inputs' own."""
        out, leaves = self.forward(attend), (self.q, self.k, self.v, *learned(self.mechanism))
        probe = self.probe if probe is None else probe
        return [
            out.detach(),
            *torch.autograd.grad(out, leaves, probe, allow_unused=True, materialize_grads=True),
        ]

    def first_row(self) -> "Inputs":
        """The first sequence in float64."""
        row, ids = copy.copy(self), self.documents.ids
        row.q, row.k, row.v = (
            x[:1].detach().double().requires_grad_() for x in (self.q, self.k, self.v)
        )
        row.mechanism = copy.deepcopy(self.mechanism)
        for part in (row.mechanism, *shared_coefficients(row.mechanism)):
            part.double()
        row.documents = Documents(
            None if ids is None else ids[:1], self.documents.length, self.documents.device
        )
        return row


def learned(mechanism: Mechanism) -> list[nn.Parameter]:
    """What a mechanism learns, alone or with other layers."""
    return [
        parameter
        for part in (mechanism, *shared_coefficients(mechanism))
        for parameter in part.parameters()
    ]


def relative_errors(given: Inputs, attend: Attend) -> dict[str, float]:
    """Errors of the output, of the gradients of q, k, v, and of what is learned, against the formula in float64.

    The kernel computes all rows, the formula up to 16 blocks of 128 queries of the first row; elsewhere the gradient
    of the output is 0. An error is inf where a number is not finite.
    """
    length = given.documents.length
    n_blocks = math.ceil(length / BLOCK)
    numbers = np.linspace(0, n_blocks - 1, min(n_blocks, MOST_BLOCKS)).round().astype(int).tolist()
    queries = [range(BLOCK * number, min(BLOCK * (number + 1), length)) for number in numbers]
    index = torch.tensor([*chain(*queries)]).to(given.q.device)
    probe = torch.zeros_like(given.probe)
    probe[0, :, index] = given.probe[0, :, index]
    out, *gradients = given.both(attend, probe)

    def formula(
        q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float
    ) -> Tensor:
        def block(first: int, end: int) -> Tensor:
            weights = eager.logits(q, k, mechanism, documents, first, end).softmax(-1)
            return grouped_product(weights, v[..., :end, :])

        return torch.cat(
            [checkpoint(block, own.start, own.stop, use_reentrant=False) for own in queries], -2
        )

    expected = given.first_row().both(formula, probe[:1, :, index].double())
    of_v, least = expected[3].norm(), SMALLEST * probe.norm(dtype=torch.float64)
    names, values = ["out", "q", "k", "v", *(f"learned {n}" for n in range(len(gradients) - 3))], {}
    for name, result, reference in zip(
        names, [out[:1, :, index], *gradients], expected, strict=True
    ):
        norm, rows = reference.norm(), len(reference)  # of the other rows the gradients are 0
        difference = torch.stack(
            [(result[:rows].double() - reference).norm(), result[rows:].norm(dtype=torch.float64)]
        )
        error = (
            difference.norm() / (torch.maximum(norm, least) if norm > NOTHING * of_v else of_v)
        ).item()
        values[name] = error if math.isfinite(error) else math.inf
    return values


def wrong(errors: dict[str, float], dtype: torch.dtype) -> str | None:
    """What is over its bound; None if nothing is."""
    bounds = {
        name: (LEARNED_BOUNDS if name.startswith("learned") else BOUNDS)[dtype] for name in errors
    }
    over = {name: error for name, error in errors.items() if not error <= bounds[name]}
    return f"relative error {max(over.values()):.1e} of {', '.join(over)}" if over else None


def seconds_of_calls(call: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Mean seconds of a call; on one CPU thread those of the processor, in which other programs have no part."""
    clock = (
        time.thread_time
        if device.type == "cpu" and torch.get_num_threads() == 1
        else time.perf_counter
    )
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    begin = clock()
    for _ in range(repeats):
        call()
    wait()
    return (clock() - begin) / repeats


def random_documents(rows: int, length: int, mean: float | None, device: torch.device) -> Documents:
    """Documents of `mean` tokens on average, always the same ones; one a row if it is None."""
    if mean is None:
        return Documents(None, length, device)
    ids = (torch.rand(rows, length, generator=torch.Generator().manual_seed(1)) < 1 / mean).cumsum(
        1
    )
    starts = Documents(ids, length, torch.device("cpu")).cu_seqlens
    return Documents(ids.to(device), length, device, starts, int(starts.diff().max()))


@torch.inference_mode(False)
def own_copy(mechanism: Mechanism) -> Mechanism:
    """A copy that shares no parameter and is not sharded; all ranks must ask for it."""
    own: dict[int, Any] = {
        id(p): nn.Parameter(full_tensor(p.detach()).clone()) for p in learned(mechanism)
    }
    for module in chain(*(part.modules() for part in (mechanism, *shared_coefficients(mechanism)))):
        own |= {
            id(hooks): {} for hooks in (module._forward_hooks, module._forward_pre_hooks)
        }  # such as a profiler's
    copied = copy.deepcopy(mechanism, own)
    for part in warm_starts(copied):
        part.share.fill_(0.5)  # at 0 every mechanism is plain attention
    return copied
