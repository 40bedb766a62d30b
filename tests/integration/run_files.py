"""What the files of a run folder say."""

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def logged(run_dir: Path, name: str) -> list[tuple[int, str]]:
    """Return the steps and values of a metric in metrics.csv, in the order of the file."""
    metrics = run_dir / "metrics.csv"
    if not metrics.exists():
        return []
    values = []
    for row in csv.DictReader(metrics.read_text().splitlines()):
        if row.get(name):
            values.append((int(row["step"]), row[name]))
    return values


def steps(run_dir: Path, name: str) -> list[int]:
    """Return the steps (from 0) with a value of a metric, in order."""
    return [step for step, _ in logged(run_dir, name)]


def column(run_dir: Path, name: str) -> list[float]:
    """Return the logged values of a metric, in order."""
    return [float(value) for _, value in logged(run_dir, name)]


def tensorboard_steps(run_dir: Path, name: str) -> list[int]:
    """Return the steps (from 0) with a value of a metric in TensorBoard, in order."""
    events = EventAccumulator(str(run_dir)).Reload()
    return [event.step for event in events.Scalars(name)]


def record_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "run.json").read_text())


def config_of(run_dir: Path) -> dict[str, Any]:
    return yaml.safe_load((run_dir / "config.yaml").read_text())


def model_settings_of(run_dir: Path) -> dict[str, Any]:
    return config_of(run_dir)["model"]["init_args"]


def samples_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the texts that the callback Samples has written."""
    lines = (run_dir / "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def file_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the files below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lines_with(text: str, beginning: str) -> list[str]:
    """Return the lines of a text that begin so."""
    return [line for line in text.splitlines() if line.startswith(beginning)]


def values(records: Iterable[Mapping[str, Any]], key: str) -> list[Any]:
    """Return the value of each record under a key."""
    return [record[key] for record in records]
