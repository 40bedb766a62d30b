"""The choice for each kind of attention in a run: that of its checkpoint, of this machine's cache, or of a trial."""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from anlit.attention import backends
from anlit.attention.choice import trial
from anlit.attention.choice.cache import Cache
from anlit.attention.choice.choices import Choice, Choices, device_label
from anlit.attention.choice.kind import Kind, like_queries
from anlit.attention.choice.process import TrialProcess
from anlit.attention.choice.trial import Outcome, Request
from anlit.attention.mechanism import Mechanism

SHARE = 0.02
"""A trial takes at most this share of the calls of attention that the run makes, so it takes less of the run's time."""
FEWEST_ROUNDS, MOST_ROUNDS = 3, 6
PASSES = 2
"""Passes of a layer in a round, of which the first prepares what the others share."""

MASKS_AT_ONCE = 4
"""Copies of a mask of all pairs that are there together, with the distances that they are made of and the gradient."""

_log = logging.getLogger("anlit.attention")


class Wanted:
    """A kind of attention in a run.

    Args:
        kind: Of the inputs.
        mechanism: That of a layer; see `own_copy`.
        n_layers: Layers of this kind.
        n_passes: Forward and backward passes of a layer that the run makes with it, all layers together.
    """

    def __init__(self, kind: Kind, mechanism: Mechanism, n_layers: int, n_passes: float) -> None:
        self.kind, self.mechanism, self.n_layers, self.n_passes = kind, mechanism, n_layers, n_passes

    def able(self, device: torch.device) -> dict[str, ModuleType]:
        """The back ends without a reason against it."""
        q = like_queries(self.kind, device)
        return {
            name: backend
            for name, backend in backends.BACKENDS.items()
            if backend.reason_against(self.mechanism, q, self.kind.dropout) is None
            and not _may_exhaust_memory(backend, self.mechanism, q)
        }

    def rounds(self, n_backends: int) -> int:
        """Rounds of a trial that the run repays; 0 if they are too few to tell the back ends apart."""
        rounds = int(SHARE * self.n_passes / (PASSES * n_backends)) - 1 if self.n_passes < 1e9 else MOST_ROUNDS
        return 0 if rounds < FEWEST_ROUNDS else min(rounds, MOST_ROUNDS)


def _may_exhaust_memory(backend: ModuleType, mechanism: Mechanism, q: Tensor) -> bool:
    """Whether a trial on the CPU might end the whole run; a GPU that is full only says so."""
    mask_bytes = getattr(backend, "mask_bytes", None)
    if q.device.type != "cpu" or mask_bytes is None:
        return False
    return MASKS_AT_ONCE * mask_bytes(mechanism, q) > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2


def choose(wanted: Sequence[Wanted], device: torch.device, known: Choices | None = None) -> Choices:
    """A choice for every kind, logged.

    Args:
        wanted: The kinds.
        device: Where.
        known: Those of the checkpoint that the run continues; they count if the device is of the same kind.
    """
    label, made = device_label(device), []
    cache = Cache(device)
    kept = known if known is not None and known.device == label else None
    with TrialProcess() as process:
        for one in wanted:
            found = _choice(one, device, kept, cache, process)
            _log.log(logging.INFO if found.seconds else logging.DEBUG, str(found))
            for name, reason in found.left_out.items():
                _log.info(f"attention {one.kind.mechanism} ({one.kind.size}): '{name}' is left out: {reason}")
            made.append(found)
    return Choices(label, tuple(made))


def _choice(one: Wanted, device: torch.device, kept: Choices | None, cache: Cache, process: TrialProcess) -> Choice:
    able, kind = one.able(device), one.kind
    if kept is not None:
        dtype, is_packed = kind.torch_dtype, kind.document is not None
        for choice in kept.nearest(kind.mechanism, dtype, kind.length, is_packed)[:1]:
            if choice.backend in able and choice.kind.dtype == kind.dtype:
                return Choice(kind, choice.backend, "the checkpoint names it", choice.seconds, choice.left_out)
    default = backends.untimed(one.mechanism, like_queries(kind, device), kind.dropout)
    if len(able) == 1:
        return Choice(kind, default, "no other can compute it here")
    with cache.held():
        found = cache.find(kind)
        if found is not None and found.backend in able:
            return replace(found, because="it was the fastest in an earlier trial")
        rounds = one.rounds(len(able))
        if not rounds:
            return Choice(kind, default, "the run is too short to repay a trial")
        outcome = try_all(Request(kind, one.mechanism, device, one.n_layers, rounds), able, process)
        if not outcome.seconds:
            return Choice(kind, default, "no back end could be timed", {}, outcome.left_out)
        fastest = min(outcome.seconds, key=outcome.seconds.__getitem__)
        found = Choice(kind, fastest, "it was the fastest", outcome.seconds, outcome.left_out)
        cache.add(found)
    return found


def try_all(request: Request, able: dict[str, ModuleType], process: TrialProcess) -> Outcome:
    """A trial of these back ends: in this process if none can do harm, else in another one.

    There too if they are to be compiled, because what the compiler keeps of it would stay.
    """
    harmless = {name: backend for name, backend in able.items() if name in backends.HARMLESS}
    if harmless.keys() == able.keys() and not request.kind.compiled:
        return trial.run(request, able)
    outcome = process.run(request, able)
    if outcome.seconds or not harmless:
        return outcome
    here = trial.run(request, harmless)
    others = {name: reason for name, reason in outcome.left_out.items() if name not in harmless}
    return Outcome(here.seconds, here.left_out | others)
