"""Those that take turns in `anlit benchmark step`: ours in this process, peers in processes that answer."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from anlit.benchmarks.attention.cases import MECHANISMS
from anlit.benchmarks.peers.training_step import PEERS, TimedStep
from anlit.benchmarks.process import Process, python_of_peer
from anlit.benchmarks.step.ours import OurStep
from anlit.benchmarks.step.plan import Size, Variant
from anlit.models.runtime import Runtime


class Entrant(Protocol):
    """One variant, built; see `TimedStep`."""

    described: dict[str, Any]
    """`parameters` and `flops_per_token`, and the `versions` of another environment."""

    def loss(self) -> float: ...

    def seconds(self, kind: str, repeats: int = 1) -> float: ...

    def peak(self) -> int | None: ...

    def close(self) -> None:
        """Free what it holds."""


class OurEntrant(TimedStep):
    """A model of ours, in this process."""

    def __init__(self, variant: Variant, size: Size, device: torch.device, documents: bool) -> None:
        runtime = Runtime(
            compile=variant.compiled != "no", float8="tensorwise" if variant.compiled == "float8" else None
        )
        mechanism = MECHANISMS[variant.mechanism]
        super().__init__(OurStep(variant.model, size, device, runtime, mechanism, variant.backend, documents), device)

    def close(self) -> None:
        del self.step


class PeerEntrant:
    """A peer in a process of its own, as its user would run it: ours changes how this one allocates memory.

    Raises:
        ProcessError: It could not be built, or the process ended.
    """

    def __init__(self, python: str, variant: Variant, size: Size, device: torch.device) -> None:
        self._process = Process("training_step", python)
        self.described: dict[str, Any] = self._process.ask(
            "build",
            peer=variant.model,
            size=size.as_json(),
            device=str(device),
            compiled=variant.compiled,
            threads=torch.get_num_threads(),
        )

    def loss(self) -> float:
        return float(self._process.ask("loss"))

    def seconds(self, kind: str, repeats: int = 1) -> float:
        return float(self._process.ask("seconds", kind=kind, repeats=repeats))

    def peak(self) -> int | None:
        found: int | None = self._process.ask("peak")
        return found

    def close(self) -> None:
        self._process.close()


def build(variant: Variant, size: Size, device: torch.device, documents: bool, python: str | None) -> Entrant:
    """A variant, ready for its first step. A peer runs in this Python if that has it, else in the one that is given."""
    if variant.model not in PEERS:
        return OurEntrant(variant, size, device, documents)
    return PeerEntrant(python_of_peer(variant.model, python), variant, size, device)


def same_work(described: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """Why a peer's step is not the work of ours; None if it is. Gains are counted as parameters by some."""
    for what, allowed in (("flops_per_token", 1e-9), ("parameters", 0.002)):
        if abs(described[what] / ours[what] - 1) > allowed:
            return f"it does other work: {what} {described[what]:.6g}, ours {ours[what]:.6g}"
    return None
