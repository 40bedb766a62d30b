"""Run folders: finding them and reading their files.

A run folder has three files. `config.yaml` is the resolved configuration. `metrics.csv` has a row
for each log call. `run.json` has launches, data fingerprint and status. A crashed run may lack any
of them. It is still read, so that a report can list it.
"""

import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anlit.config.labels import (
    CONFIG,
    architecture_label,
    attention_label,
    init_args,
    mapping,
)
from anlit.errors import UserError
from anlit.io.metrics_csv import LEAVE_OUT, parse_cell, read_rows
from anlit.io.read import read_json, read_yaml

METRICS = "metrics.csv"
"""Name of the file of logged values in a run folder."""
RECORD = "run.json"
"""Name of the record in a run folder."""
SAMPLES = "samples.jsonl"
"""Name of the file of texts that a model in training wrote, in a run folder."""
LAUNCHES = "launches.json"
"""Name of a study's notes on the starts of a run, in a run folder."""
LAUNCH_SCHEMA = {
    "started": str,
    "step": int,
    "command": str,
    "changed": [str],
    "versions": dict,
    "git": {"commit": str, "dirty": bool},
    "hardware": {"devices": [str], "cpu": str, "cores": int, "threads": int},
}
"""The content of a launch in run.json, see `anlit.io.read`."""
SPLIT_SCHEMA = {"documents": int, "bytes": int, "tokens": int, "text_sha256": str}
"""The size of a split of the data, and a hash of its text."""
RECORD_SCHEMA = LAUNCH_SCHEMA | {
    "name": str,
    "tags": [str],
    "status": str,
    "ended": str,
    "steps": int,
    "error": str,
    "architecture": str,
    "parameters": int,
    "attention": object,
    "averaged_by": str,
    "begun_from": str,
    "launches": [LAUNCH_SCHEMA],
    "data": {
        "class": str,
        "content_sha256": str,
        "tokenizer_sha256": str,
        "train": SPLIT_SCHEMA,
        "val": SPLIT_SCHEMA,
    },
}
"""The content of run.json. Results of earlier commits have the keys of a single launch beside the
others."""
VALIDATION_COLUMNS = ("val/tokens", "val/seconds", "val/loss", "val/bits_per_byte")
"""Columns of metrics.csv that make up a validation point."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Validation points in order, as arrays of shape (points,).

    Args:
        tokens: Training tokens.
        seconds: Training seconds without validation. NaN if not logged.
        loss: Nats per token.
    """

    tokens: NDArray[np.float64]
    seconds: NDArray[np.float64]
    loss: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.tokens)

    def finite(self) -> "Curve":
        """The same curve without points of NaN or infinite loss."""
        is_finite = np.isfinite(self.loss)
        return Curve(self.tokens[is_finite], self.seconds[is_finite], self.loss[is_finite])


NO_CURVE = Curve(*np.empty((3, 0)))
"""The curve of a run without a validation."""


@dataclass(frozen=True, eq=False)
class Run:
    """The content of one run folder.

    `record` is run.json, `config` is config.yaml ({} if missing). `bits_per_byte` is of the last
    validation.
    """

    folder: Path
    config: dict[str, Any]
    record: dict[str, Any]
    curve: Curve = NO_CURVE
    bits_per_byte: float | None = None

    @property
    def architecture(self) -> str:
        """Display name: GPT+, nGPT, anGPT, or the class name of another model."""
        return architecture_label(self.config.get("model")) or "unknown"

    @property
    def attention(self) -> str:
        """Name of the attention mechanism; `plain` if none is set."""
        return attention_label(init_args(self.config.get("model")).get("attention"))

    @property
    def name(self) -> str | None:
        """The name that the user gave the run. None without a name."""
        return self.record.get("name") or None

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(self.record.get("tags") or ())

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
        """The last validation loss in nats per token; the curve must not be empty."""
        return float(self.curve.loss[-1])

    @property
    def parameters(self) -> int | None:
        return self.record.get("parameters")

    @property
    def averaged_by(self) -> str | None:
        """The callback whose averages of the weights were validated. None for the weights alone."""
        return self.record.get("averaged_by")

    @property
    def begun_from(self) -> str | None:
        """What tells the weights apart from which runs began. None if it was not recorded."""
        return self.record.get("begun_from")

    @property
    def content_hash(self) -> str | None:
        """SHA-256 of the tokenised corpus. None if it was not recorded."""
        return mapping(self.record.get("data")).get("content_sha256") or None

    @property
    def tokenizer_hash(self) -> str | None:
        """SHA-256 of the tokenizer. None if it was not recorded."""
        return mapping(self.record.get("data")).get("tokenizer_sha256") or None

    def split_counts(self, split: str) -> dict[str, Any]:
        """The size of a split of the data in documents, bytes and tokens, and its text's hash."""
        return mapping(mapping(self.record.get("data")).get(split))

    @property
    def launches(self) -> list[dict[str, Any]]:
        """The start of the run and each continuation.

        Each has started, step, command, changed, versions, git and hardware.
        """
        return self.record.get("launches") or [self.record]

    @property
    def started(self) -> str | None:
        """The time of the first start in UTC, as in run.json. None if it was not recorded."""
        return self.launches[0].get("started")

    @property
    def changes(self) -> list[str]:
        """`name old → new from step n` for each launch that changed settings.

        A launch is left out if a later launch began at its step or before.
        """
        sentences = []
        next_step = math.inf
        for launch in reversed(self.launches):
            step = launch.get("step") or 0
            if launch.get("changed") and step < next_step:
                sentences.append(f"{', '.join(launch['changed'])} from step {step}")
            next_step = min(next_step, step)
        return sentences[::-1]

    @property
    def commit(self) -> str | None:
        """`commit_label` of the launches, joined by "and" where they differ."""
        return self._join_labels(commit_label)

    @property
    def hardware(self) -> str | None:
        """`hardware_label` of the launches, joined by "and" where they differ."""
        return self._join_labels(hardware_label)

    def _join_labels(self, label_of: Callable[[dict[str, Any]], str | None]) -> str | None:
        labels = filter(None, map(label_of, self.launches))
        return " and ".join(dict.fromkeys(labels)) or None

    @property
    def status(self) -> str:
        """running, finished, interrupted or failed as recorded; `unknown` without a record."""
        return str(self.record.get("status") or "unknown")

    @property
    def diverged(self) -> bool:
        """Whether the last validation loss is NaN or infinite."""
        return len(self.curve) > 0 and not np.isfinite(self.final_loss)

    @property
    def state(self) -> str:
        """`status` in words for a table, and the reason if the run cannot be compared."""
        if len(self.curve) == 0:
            return f"{self.status}, no validation"
        return f"{self.status}, diverged" if self.diverged else self.status

    @property
    def comparable(self) -> bool:
        """Whether the run has a configuration and a finite last validation loss."""
        return bool(self.config) and len(self.curve) > 0 and not self.diverged

    @property
    def complete(self) -> bool:
        """Whether the run is comparable, and finished as far as its record says."""
        return self.comparable and self.status in ("finished", "unknown")

    @property
    def lost(self) -> bool:
        """Whether the run failed, diverged or never validated. A run that may go on is not lost."""
        may_go_on = self.status in ("running", "interrupted")
        return self.diverged or (not self.complete and not may_go_on)


def commit_label(launch: dict[str, Any]) -> str | None:
    """The short commit of a launch, with `+dirty` if the tree had uncommitted changes.

    None if not recorded.
    """
    git = mapping(launch.get("git"))
    if not git.get("commit"):
        return None
    commit = str(git["commit"])[:10]
    return f"{commit}+dirty" if git.get("dirty") else commit


def hardware_label(record: dict[str, Any]) -> str | None:
    """The devices of a record, or processor and cores if it is the device. None if not recorded.

    Equal devices are counted: `64 × NVIDIA H100 80GB HBM3`.
    """
    hardware = mapping(record.get("hardware"))
    counts = Counter(str(device) for device in hardware.get("devices") or [])
    if {*counts} == {"cpu"}:
        return f"{hardware.get('cpu') or 'unnamed'} cpu, {hardware.get('cores', '?')} cores"
    names = [f"{count:,} × {name}" if count > 1 else name for name, count in counts.items()]
    return ", ".join(names) or None


def find_runs(paths: Iterable[str]) -> list[Path]:
    """Run folders among `paths` and anywhere below them, each once, in the order of their names."""
    folders: dict[Path, Path] = {}
    for path in paths:
        if not Path(path).is_dir():
            fix = "give run folders or folders that hold run folders"
            raise UserError(f"{path} is not a folder: {fix}")
        runs = list(_walk_runs(path))
        if not runs:
            raise UserError(
                f"{path} holds no run folder: a run folder has {CONFIG} with {METRICS} or "
                f"{RECORD}; give the run_dir of a training or a folder above it"
            )
        for run in runs:
            folders.setdefault(run.resolve(), run)
    return list(folders.values())


def _walk_runs(path: str) -> Iterator[Path]:
    """Folders with at least two of the three files. Nothing below a run folder is a run.

    Links are followed, after all folders without one: a run with two names has that of its folder.
    """
    visited: set[str] = set()
    waiting = deque([path])
    while waiting:
        folder = waiting.popleft()
        real_folder = os.path.realpath(folder)
        if real_folder in visited:
            continue
        visited.add(real_folder)
        _, subfolders, files = next(os.walk(folder), ("", [], []))
        if len({CONFIG, METRICS, RECORD} & {*files}) > 1:
            yield Path(folder)
            continue
        for name in sorted(subfolders, reverse=True):
            subfolder = os.path.join(folder, name)
            if os.path.islink(subfolder):
                waiting.append(subfolder)
            else:
                waiting.appendleft(subfolder)


def load_run(folder: Path) -> Run:
    """Read one run folder.

    A missing file gives an empty configuration, record or curve, a damaged file a UserError.
    """
    config, record = read_settings_of_run(folder)
    curve, bits_per_byte = _read_validation(folder / METRICS)
    return Run(folder, config, record, curve, bits_per_byte)


def read_settings_of_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration and the record of a run folder, {} for a missing file.

    Raises UserError for a damaged file.
    """
    config = {}
    if (folder / CONFIG).exists():
        config = read_yaml(folder / CONFIG, (dict, type(None)), LEAVE_OUT)
    return mapping(config), read_run_record(folder, LEAVE_OUT)


def read_run_record(folder: Path, advice: str = "repair or remove it") -> dict[str, Any]:
    """The content of run.json in a run folder, {} without the file.

    Raises UserError, which ends in `advice`, for a damaged file.
    """
    return read_json(folder / RECORD, RECORD_SCHEMA, advice, missing={})


def _read_validation(path: Path) -> tuple[Curve, float | None]:
    """The validation curve and the last bits per byte.

    Points of a resumed run replace the points that it repeats.
    """
    points: list[list[float]] = []
    for row in read_rows(path) if path.exists() else []:
        if not row.get("val/loss"):
            continue
        point = [parse_cell(row, column, path) for column in VALIDATION_COLUMNS]
        if math.isfinite(point[0]):
            while points and points[-1][0] >= point[0]:
                points.pop()
            points.append(point)
    columns = np.array(points, dtype=np.float64).reshape(-1, len(VALIDATION_COLUMNS)).T
    tokens, seconds, loss, bits_per_byte = columns
    has_bits = len(loss) > 0 and np.isfinite(bits_per_byte[-1])
    return Curve(tokens, seconds, loss), float(bits_per_byte[-1]) if has_bits else None
