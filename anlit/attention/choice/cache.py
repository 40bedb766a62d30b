"""Earlier choices on this machine: a file for each device, torch, anlit and version of the kernels' packages.

It is in $XDG_CACHE_HOME/anlit, by default ~/.cache/anlit, and may be deleted. Runs that start together wait for the
first, so that they take the same back ends and do not disturb its measurement.
"""

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

import anlit
from anlit.attention.choice.choices import Choice, Choices, device_label
from anlit.attention.choice.kind import Kind
from anlit.reporting.files import write_json
from anlit.reporting.once import say_once
from anlit.reporting.provenance import versions

PACKAGES = ("anlit", "torch", "triton", "flash-attn", "flash-attn-4", "nvidia-cutlass-dsl")
PATIENCE = 310.0
"""Seconds that a run waits for the trials of another one: as long as they may take."""

_log = logging.getLogger("anlit.attention")


class Cache:
    """The choices that were made on a device.

    Args:
        device: Where.
    """

    def __init__(self, device: torch.device) -> None:
        self.label = device_label(device)
        self._made_by = {
            "device": self.label,
            "threads": torch.get_num_threads() if device.type == "cpu" else None,
            "versions": {name: version for name, version in versions().items() if name in PACKAGES},
            "sources": _sources(),
        }
        name = hashlib.sha256(json.dumps(self._made_by, sort_keys=True).encode()).hexdigest()[:16]
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        self.path = Path(home).expanduser() / "anlit" / f"attention-{name}.json"

    def find(self, kind: Kind) -> Choice | None:
        """The choice for exactly this kind; None if there is none, or the file cannot be read."""
        return next((choice for choice in self._read() if choice.kind == kind), None)

    def add(self, choice: Choice) -> None:
        """Keep a choice. Where the file cannot be written, the next run makes it again."""
        made = Choices(self.label, (*(one for one in self._read() if one.kind != choice.kind), choice))
        try:
            write_json(self.path, {**self._made_by, **made.as_plain()})
        except OSError as error:
            say_once(_log, f"{self.path} cannot be written ({error.strerror}): other runs try the back ends again")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else holds it meanwhile, except where the file system has no locks or another run takes too long."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = self.path.with_suffix(".lock").open("a")
        except OSError:
            yield
            return
        with lock:
            end = time.monotonic() + PATIENCE
            while not _is_locked(lock) and time.monotonic() < end:
                time.sleep(0.05)
            yield

    def _read(self) -> tuple[Choice, ...]:
        try:
            found = Choices.from_plain(json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return ()
        return found.made if found is not None else ()


def _is_locked(file: Any) -> bool:
    """Whether to go on: the lock is ours, or there are no locks here."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@cache
def _sources() -> str:
    """The code of anlit's attention, so that a changed kernel is tried again."""
    content = hashlib.sha256()
    for file in sorted((Path(anlit.__file__).parent / "attention").rglob("*.py")):
        content.update(file.read_bytes())
    return content.hexdigest()[:16]
