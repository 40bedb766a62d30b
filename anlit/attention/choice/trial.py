"""Checks back ends on small inputs of a kind, and times those that are right on inputs of the real size."""

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType

import torch

from anlit.attention.backends import attend_by
from anlit.attention.choice import proof
from anlit.attention.choice.inputs import Attend, Inputs, prepare, random_documents
from anlit.attention.choice.kind import Kind
from anlit.attention.mechanism import Mechanism

CHECKED_LENGTH = {"cpu": 320, "cuda": 4096}
"""Tokens of the sequence that the check has: some blocks of every kernel, the last of them not full."""
CHECKED_DOCUMENTS = 5
"""About as many documents are in the check, if documents are packed."""
AT_LEAST_SECONDS, MOST_REPEATS = 0.005, 8
"""On a GPU a turn repeats the call until it has about this long, so that calls queue up as in a run."""
HOPELESS, AFTER_ROUNDS = 2.0, 2
"""After these rounds, who takes more than this many times the fastest's time takes no further part."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What is to be tried.

    Args:
        kind: The inputs' kind.
        mechanism: A layer's mechanism; see `own_copy`.
        device: Where.
        n_layers: Layers of this kind, which share what a back end derives from the documents.
        rounds: How often the back ends take turns.
    """

    kind: Kind
    mechanism: Mechanism
    device: torch.device
    n_layers: int
    rounds: int


@dataclass
class Outcome:
    """Seconds of a layer's forward and backward pass by back end, and why others were left out."""

    seconds: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def run(request: Request, backends: Mapping[str, ModuleType], say: Say = lambda name: None) -> Outcome:
    """Check every back end, then time them in turns. Random state and gradients stay as they are.

    Args:
        request: What is to be tried.
        backends: By name; none of them has a reason against the kind.
        say: Is told the name of the back end that works next.
    """
    found = Outcome()
    devices = [request.device] if request.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(request.device.type, enabled=False),
    ):
        right: dict[str, ModuleType] = {}
        for name, backend in backends.items():
            say(name)
            reason = _failure(partial(_wrong, request, backend))
            if reason is None:
                right[name] = backend
            else:
                found.left_out[name] = reason
        _take_turns(request, right, found, say)
    return found


def _failure(call: Callable[[], str | None] | Callable[[], None]) -> str | None:
    """What `call` returns, or what it raised: whatever a kernel or a compiler raises, the run goes on without it."""
    try:
        return call()
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return f"it fails: {lines[0][:200]}"


def _wrong(request: Request, backend: ModuleType) -> str | None:
    kind = request.kind
    length = min(kind.length, CHECKED_LENGTH.get(request.device.type, CHECKED_LENGTH["cuda"]))
    mean = None if kind.document is None else min(kind.document, max(1, 2 * length // CHECKED_DOCUMENTS))
    documents = random_documents(2, length, mean, request.device)
    sizes = (kind.heads, kind.key_heads, kind.width, kind.torch_dtype)
    given = Inputs(request.mechanism, documents, 2, *sizes)
    prepare(backend, given.mechanism, documents, 2)
    found = proof.errors(given.both(partial(attend_by, backend)), proof.reference(given), given.probe)
    return proof.wrong(found, kind.torch_dtype)


class Turn:
    """One back end on inputs of the real size.

    Args:
        request: What is to be tried.
        backend: Which computes.
        inputs: Shared by all back ends.
    """

    def __init__(self, request: Request, backend: ModuleType, inputs: Inputs) -> None:
        self.request, self.backend, self.inputs, self.repeats = request, backend, copy.copy(inputs), 1
        self.begin = self.others = math.inf
        compiles = request.kind.compiled
        attend: Attend = partial(attend_by, backend)
        self.attend = torch.compile(attend, dynamic=False, fullgraph=True) if compiles else attend

    def take(self) -> None:
        """Pass through a batch's first layer, which derives from the documents what all layers share, and others."""
        kind = self.request.kind
        documents = random_documents(kind.rows, kind.length, kind.document, self.request.device)
        self.inputs.documents = documents

        def first() -> None:
            prepare(self.backend, self.inputs.mechanism, documents, kind.rows)
            self._both()

        self.begin = min(self.begin, seconds_of_calls(first, documents.device))
        self.others = min(self.others, seconds_of_calls(self._both, documents.device, self.repeats))
        if self.request.device.type == "cuda":
            self.repeats = min(MOST_REPEATS, max(1, math.ceil(AT_LEAST_SECONDS / max(self.others, 1e-9))))

    @property
    def seconds(self) -> float:
        """Of a layer in the mean, by the least times so far: what else the machine does only adds to them."""
        n_layers = self.request.n_layers
        return (self.begin + (n_layers - 1) * self.others) / n_layers

    def _both(self) -> None:
        self.inputs.both(self.attend, self.request.kind.dropout)


def seconds_of_calls(call: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Mean seconds of a call; on one CPU thread those of the processor, in which other programs have no part."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    _wait(device)
    begin = clock()
    for _ in range(repeats):
        call()
    _wait(device)
    return (clock() - begin) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _take_turns(request: Request, backends: Mapping[str, ModuleType], found: Outcome, say: Say) -> None:
    """Time the back ends in turns, so that whatever else the machine does hits all of them."""
    kind = request.kind
    documents = random_documents(kind.rows, kind.length, kind.document, request.device)
    sizes = (kind.heads, kind.key_heads, kind.width, kind.torch_dtype)
    inputs = Inputs(request.mechanism, documents, kind.rows, *sizes)
    running = {name: Turn(request, backend, inputs) for name, backend in backends.items()}
    for number in range(request.rounds + 1):  # kernels may be compiled in the first
        if number > AFTER_ROUNDS and len(running) < 2:
            break
        names = list(running)
        first = number % max(1, len(names))
        for name in (*names[first:], *names[:first]):
            say(name)
            if (reason := _failure(running[name].take)) is not None:
                found.left_out[name] = reason
                found.seconds.pop(name, None)
                del running[name]
            else:
                found.seconds[name] = running[name].seconds
        if number >= AFTER_ROUNDS:
            limit = HOPELESS * min(found.seconds.values(), default=0.0)
            running = {name: turn for name, turn in running.items() if found.seconds[name] <= limit}
