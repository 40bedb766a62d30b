"""Run folders: finding them and reading what is in them.

They hold `config.yaml` (the resolved configuration), `metrics.csv` (a row for each log call) and `run.json` (launches,
data fingerprint, status). A crashed run may lack any of them; it is read all the same, so that a report can list it.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anlit.config.labels import (
    ARCHITECTURES,
    CONFIG,
    attention_label,
    class_name,
    init_args,
    mapping,
)
from anlit.errors import UserError
from anlit.io.read import parse_cell, read_json, read_rows, read_yaml

METRICS, RECORD = "metrics.csv", "run.json"
LAUNCHES = "launches.json"
"""What a study notes of the starts of a run."""
LAUNCH_SCHEMA = {
    "started": str, "step": int, "command": str, "changed": [str], "versions": dict,
    "git": {"commit": str, "dirty": bool},
    "hardware": {"devices": [str], "cpu": str, "cores": int, "threads": int},
}  # fmt: skip
"""What run.json holds of each launch, see `anlit.io.read`."""
RECORD_SCHEMA = LAUNCH_SCHEMA | {
    "status": str, "ended": str, "error": str, "architecture": str, "parameters": int, "attention": object,
    "launches": [LAUNCH_SCHEMA],
    "data": {"content_sha256": str, "tokenizer_sha256": str},
}  # fmt: skip
"""What run.json holds; recorded results of earlier commits have a single launch's keys beside the others."""
LEAVE_OUT = "repair the file or leave the run out"


@dataclass(frozen=True, eq=False)
class Curve:
    """Validation points in order: training tokens, training seconds without validation (NaN if not logged), and
    loss in nats per token; each has shape (points,).
    """

    tokens: NDArray[np.float64]
    seconds: NDArray[np.float64]
    loss: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.tokens)

    def finite(self) -> "Curve":
        """The same curve without points whose loss is NaN or infinite."""
        keep = np.isfinite(self.loss)
        return Curve(self.tokens[keep], self.seconds[keep], self.loss[keep])


@dataclass(frozen=True, eq=False)
class Run:
    """The content of one run folder; `record` is run.json, `config` is config.yaml ({} if missing)."""

    folder: Path
    config: dict[str, Any]
    record: dict[str, Any]
    curve: Curve
    bits_per_byte: float | None

    @property
    def architecture(self) -> str:
        """Display name: GPT+, nGPT, anGPT, or the class name of another model."""
        name = class_name(self.config.get("model"))
        return ARCHITECTURES.get(name, name) or "unknown"

    @property
    def attention(self) -> str:
        """Name of the attention mechanism; `plain` if none is set."""
        return attention_label(init_args(self.config.get("model")).get("attention"))

    @property
    def seed(self) -> int | None:
        seed = self.config.get("seed_everything")
        return seed if isinstance(seed, int) and not isinstance(seed, bool) else None

    @property
    def seeds(self) -> tuple[int | None, Any]:
        """Seeds of the model's initial values and of the data order."""
        return self.seed, init_args(self.config.get("data")).get("seed")

    @property
    def final_loss(self) -> float:
        """The last validation loss in nats per token, of a run that has one."""
        return float(self.curve.loss[-1])

    @property
    def parameters(self) -> int | None:
        return self.record.get("parameters")

    @property
    def content_hash(self) -> str | None:
        """SHA-256 of the tokenised corpus; None, as below, if it was not recorded."""
        return mapping(self.record.get("data")).get("content_sha256") or None

    @property
    def tokenizer_hash(self) -> str | None:
        return mapping(self.record.get("data")).get("tokenizer_sha256") or None

    @property
    def launches(self) -> list[dict[str, Any]]:
        """The start of the run and each continuation: {started, step, command, changed, versions, git, hardware}."""
        return self.record.get("launches") or [self.record]

    @property
    def changes(self) -> list[str]:
        """`name old → new from step n` of each launch that changed settings, if no later one began there or before."""
        steps = [launch.get("step") or 0 for launch in self.launches]
        return [f"{', '.join(launch['changed'])} from step {steps[n]}" for n, launch in enumerate(self.launches)
                if launch.get("changed") and steps[n] < min(steps[n + 1 :], default=math.inf)]  # fmt: skip

    @property
    def commit(self) -> str | None:
        """`commit_label` of the launches, those that differ joined by "and"."""
        return " and ".join(dict.fromkeys(filter(None, map(commit_label, self.launches)))) or None

    @property
    def hardware(self) -> str | None:
        """`hardware_label` of the launches, those that differ joined by "and"."""
        return " and ".join(dict.fromkeys(filter(None, map(hardware_label, self.launches)))) or None

    @property
    def status(self) -> str:
        """running, finished, interrupted or failed as recorded; `unknown` without a record."""
        return str(self.record.get("status") or "unknown")

    @property
    def diverged(self) -> bool:
        """Its last validation loss is NaN or infinite."""
        return len(self.curve) > 0 and not np.isfinite(self.final_loss)

    @property
    def state(self) -> str:
        """`status` in words for a table, and the reason if the run cannot be compared."""
        if len(self.curve) == 0:
            return f"{self.status}, no validation"
        return f"{self.status}, diverged" if self.diverged else self.status

    @property
    def comparable(self) -> bool:
        """Known configuration and a finite last validation loss."""
        return bool(self.config) and len(self.curve) > 0 and not self.diverged

    @property
    def complete(self) -> bool:
        """Comparable, and finished as far as is known."""
        return self.comparable and self.status in ("finished", "unknown")

    @property
    def lost(self) -> bool:
        """Ended without a final loss: it failed, diverged or never validated. A run that may go on is not lost."""
        return self.diverged or (
            not self.complete and self.status not in ("running", "interrupted")
        )


def commit_label(launch: dict[str, Any]) -> str | None:
    """The short commit of a launch, with `+dirty` if the tree had uncommitted changes; None if not recorded."""
    git = mapping(launch.get("git"))
    return (
        str(git["commit"])[:10] + "+dirty" * bool(git.get("dirty")) if git.get("commit") else None
    )


def hardware_label(record: dict[str, Any]) -> str | None:
    """The hardware of a record in words: devices, with the processor if it is the device; None if not recorded."""
    hardware = mapping(record.get("hardware"))
    devices = [str(device) for device in hardware.get("devices") or []]
    if {*devices} == {"cpu"}:
        return f"{hardware.get('cpu') or 'unnamed'} cpu, {hardware.get('cores', '?')} cores"
    return ", ".join(devices) or None


def find_runs(paths: Iterable[str]) -> list[Path]:
    """Run folders among `paths` and anywhere below them, each once, in the order of their names."""
    folders: dict[Path, Path] = {}
    for given in paths:
        if not Path(given).is_dir():
            raise UserError(
                f"{given} is not a folder: give run folders or folders that hold run folders."
            )
        runs = []
        for folder, below, files in os.walk(given):
            below.sort()
            if len({CONFIG, METRICS, RECORD} & set(files)) > 1:
                below.clear()
                runs.append(Path(folder))
        if not runs:
            raise UserError(f"{given} holds no run folder: a run folder has {CONFIG} with {METRICS} or {RECORD}; give "
                            "the run_dir of a training or a folder above it.")  # fmt: skip
        for run in runs:
            folders.setdefault(run.resolve(), run)
    return list(folders.values())


def load_run(folder: Path) -> Run:
    """Reads one run folder; missing files give an empty configuration, record or curve, damaged ones a UserError."""
    return Run(folder, *read_settings_of_run(folder), *_read_validation(folder / METRICS))


def read_settings_of_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration and the record of a run folder, {} for a missing file.

    Raise UserError for a damaged file.
    """
    config = {}
    if (folder / CONFIG).exists():
        config = read_yaml(folder / CONFIG, (dict, type(None)), LEAVE_OUT)
    record = read_json(folder / RECORD, RECORD_SCHEMA, LEAVE_OUT, missing={})
    return mapping(config), record


def _read_validation(path: Path) -> tuple[Curve, float | None]:
    """The validation curve and the last bits per byte; points of a resumed run replace those that it repeats."""
    points: list[list[float]] = []
    for row in read_rows(path) if path.exists() else []:
        point = [
            parse_cell(row, f"val/{name}", path)
            for name in ("tokens", "seconds", "loss", "bits_per_byte")
        ]
        if np.isfinite(point[0]) and row.get("val/loss"):
            while points and points[-1][0] >= point[0]:
                points.pop()
            points.append(point)
    columns = np.array(points, dtype=np.float64).reshape(-1, 4).T
    bits = float(columns[3, -1]) if points and np.isfinite(columns[3, -1]) else None
    return Curve(*columns[:3]), bits
