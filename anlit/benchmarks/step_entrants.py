"""Those that take turns in `anlit benchmark step`: ours in this process, peers in processes that answer."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from anlit.benchmarks import step_worker
from anlit.benchmarks.attention_cases import MECHANISMS
from anlit.benchmarks.step_ours import OurStep
from anlit.benchmarks.step_size import Size, Variant
from anlit.benchmarks.step_worker import PEERS, Timed
from anlit.errors import UserError
from anlit.models.runtime import Runtime


class Entrant(Protocol):
    """One variant, built."""

    described: dict[str, Any]
    """`parameters` and `flops_per_token`, and of another environment its `versions`."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """As `Timed.answer`."""

    def close(self) -> None:
        """Free what it holds."""


class Here:
    """A model of ours, in this process."""

    def __init__(self, variant: Variant, size: Size, device: torch.device, documents: bool) -> None:
        runtime = Runtime(
            compile=variant.compiled != "no", float8="tensorwise" if variant.compiled == "float8" else None
        )
        mechanism = MECHANISMS[variant.mechanism]
        step = OurStep(variant.model, size, device, runtime, mechanism, variant.backend, documents)
        self.described = step_worker.described(step)
        self._timed = Timed(step, device)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._timed.answer(request)

    def close(self) -> None:
        del self._timed


class Elsewhere:
    """A peer in a process of its own, as its user would run it: ours sets how this one allocates memory.

    Raises:
        RuntimeError: It could not be built, or the process ended.
    """

    def __init__(self, python: str, variant: Variant, size: Size, device: torch.device) -> None:
        given = {
            "peer": variant.model,
            "compiled": variant.compiled,
            "size": size.as_json(),
            "device": str(device),
            "threads": torch.get_num_threads(),
        }
        self._process = subprocess.Popen(
            [python, "-I", step_worker.__file__, json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.described = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
        if "error" in answer:
            self.close()
            raise RuntimeError(answer["error"])
        return answer

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({**request, "empty_cache": True}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise RuntimeError("its process ended") from error
        return self._read()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def build(variant: Variant, size: Size, device: torch.device, documents: bool, python: str | None) -> Entrant:
    """A variant, ready for its first step. A peer runs in this Python if that has it, else in the one that is given."""
    if variant.model not in PEERS:
        return Here(variant, size, device, documents)
    chosen = sys.executable if _is_here(variant.model) else python
    assert chosen is not None, "check_peers refuses that"
    return Elsewhere(chosen, variant, size, device)


def check_peers(peers: tuple[str, ...], python: str | None) -> None:
    """Raises UserError for a peer that neither this Python nor the given one can import."""
    for peer in peers:
        if peer not in PEERS:
            raise UserError(f"--peer {peer} is not known: choose from {', '.join(PEERS)}")
        if _is_here(peer):
            continue
        if python is None:
            raise UserError(
                f"--peer {peer} is not installed here: give --peer-python, the Python of an environment that has it, "
                "or leave it out"
            )
        try:
            subprocess.run([python, "-I", "-c", f"import {peer}"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError(f"--peer-python {python} cannot import {peer}: install it there") from error


def can_have(peer: str, python: str | None) -> bool:
    """Whether there is an environment for this peer."""
    return _is_here(peer) or python is not None


def _is_here(peer: str) -> bool:
    return importlib.util.find_spec(peer) is not None


def same_work(described: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """Why a peer's step is not the work of ours; None if it is. Gains are counted as parameters by some."""
    for what, allowed in (("flops_per_token", 1e-9), ("parameters", 0.002)):
        if abs(described[what] / ours[what] - 1) > allowed:
            return f"it does other work: {what} {described[what]:.6g}, ours {ours[what]:.6g}"
    return None
