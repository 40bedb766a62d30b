"""One line on each run of a folder: progress, losses, speed and settings.

Only the end of metrics.csv is read, so a folder of a thousand long runs takes seconds.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from anlit.config.labels import mapping
from anlit.errors import UserError
from anlit.io.metrics_csv import Row, parse_cell, read_rows
from anlit.runs.folders import CONFIG, METRICS, RECORD, Run, read_settings_of_run
from anlit.runs.groups import learned_settings
from anlit.runs.labels import short_names, show, without_arguments

TAIL_BYTES = 2**18
"""Bytes at the end of metrics.csv that are read; an earlier validation loss is not shown."""
LOGGED_COLUMNS = (
    "step",
    "train/tokens",
    "val/tokens",
    "train/loss",
    "val/loss",
    "train/learning_rate",
    "train/tokens_per_second",
)
SEED = "seed_everything"
"""The setting that most often tells runs apart; `learned_settings` leaves it out."""


@dataclass(frozen=True)
class Overview:
    """One run. A number that the run has not logged is None.

    Args:
        name: The name that the run was given; without one, its folder.
        folder: The folder, below the folder that all runs lie in.
        tags: The tags that the run was given.
        state: running, finished, interrupted, failed or unknown, as the run recorded it.
        step: Optimizer steps that are logged; without a log the steps at the end of the run.
        steps: Optimizer steps in all. None if only epochs are set.
        tokens: Training tokens at the last logged step or validation, whichever is later.
        train_loss: The last logged training loss, in nats per token.
        val_loss: The last validation loss, in nats per token.
        rate: The learning rate of the last logged step, not the peak.
        tokens_per_second: The last logged speed.
        age: Seconds since the run last wrote its metrics, or without them its record.
        changes: Settings that differ from their `common_settings`, as `name=value`.
        fault: Why its metrics cannot be read. They are None then.
    """

    name: str
    folder: str
    tags: tuple[str, ...]
    state: str
    step: int | None
    steps: int | None
    tokens: float | None
    train_loss: float | None
    val_loss: float | None
    rate: float | None
    tokens_per_second: float | None
    age: float | None
    changes: tuple[str, ...]
    fault: str | None


UNSORTED = ("changes", "fault", "tags")
SORT_KEYS = tuple(field.name for field in fields(Overview) if field.name not in UNSORTED)


def read_overviews(folders: Sequence[Path], tags: Sequence[str] = ()) -> list[Overview]:
    """Read one `Overview` per run folder with all the tags, in their order.

    Raise UserError for a damaged configuration or record, or if no run has the tags.
    """
    all_runs = [Run(folder, *read_settings_of_run(folder)) for folder in folders]
    if not all_runs:
        return []
    root = Path(os.path.commonpath([folder.resolve() for folder in folders]))
    if len(folders) == 1:
        root = root.parent
    runs = [run for run in all_runs if set(tags).issubset(run.tags)]
    if not runs:
        raise _no_such_tag(all_runs, tags)
    settings = [settings_of(run) for run in runs]
    common = common_settings(settings)
    changed = [differing_keys(common, run_settings) for run_settings in settings]
    names = short_names(sorted(set().union(*changed)))
    overviews = []
    for run, run_settings, keys in zip(runs, settings, changed, strict=True):
        changes = []
        for key in keys:
            changes.append(f"{names[key]}={show(run_settings, key)}")
        name = str(run.folder.resolve().relative_to(root))
        overviews.append(overview_of(run, name, tuple(changes)))
    return overviews


def _no_such_tag(runs: Sequence[Run], tags: Sequence[str]) -> UserError:
    known_tags = sorted(set().union(*(run.tags for run in runs)))
    listed = ", ".join(known_tags) or "none"
    return UserError(
        f"--tag {','.join(tags)}: none of {len(runs)} runs is tagged so: their tags are {listed}"
    )


def settings_of(run: Run) -> dict[str, Any]:
    """Return what the run learns from, by dotted key, with its seed."""
    return learned_settings(run) | {SEED: run.seed}


def common_settings(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the most frequent value of each setting; of equally frequent ones the first run's."""
    keys: dict[str, None] = {}  # in their order
    for run_settings in settings:
        keys |= dict.fromkeys(run_settings)
    common = {}
    for key in keys:
        values = [run_settings.get(key) for run_settings in settings]
        common[key] = Counter(values).most_common(1)[0][0]
    return common


def differing_keys(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return the keys whose values differ, without the arguments of a class that differs."""
    keys = [key for key in {**first, **second} if first.get(key) != second.get(key)]
    return without_arguments(keys)


def overview_of(run: Run, folder: str, changes: tuple[str, ...]) -> Overview:
    """Return the overview of a run from its record, configuration and last metrics."""
    numbers: dict[str, float | None] = dict.fromkeys(LOGGED_COLUMNS)
    fault = None
    try:
        numbers = last_numbers(run.folder / METRICS)
    except UserError as error:
        fault = str(error)
    last_logged = numbers["step"]
    step = run.record.get("steps") if last_logged is None else int(last_logged) + 1
    max_steps = mapping(run.config.get("trainer")).get("max_steps")
    return Overview(
        name=run.name or folder,
        folder=folder,
        tags=run.tags,
        state=run.status,
        step=step,
        steps=max_steps if isinstance(max_steps, int) and max_steps > 0 else None,
        tokens=latest_tokens(numbers),
        train_loss=numbers["train/loss"],
        val_loss=numbers["val/loss"],
        rate=numbers["train/learning_rate"],
        tokens_per_second=numbers["train/tokens_per_second"],
        age=age_of(run.folder),
        changes=changes,
        fault=fault,
    )


def latest_tokens(numbers: dict[str, float | None]) -> float | None:
    """Return the training tokens of the last row of any kind, from the last numbers by column.

    The last step is validated and need not be a logging step.
    """
    counts = [numbers["train/tokens"], numbers["val/tokens"]]
    return max((count for count in counts if count is not None), default=None)


def last_numbers(path: Path, n_bytes: int | None = TAIL_BYTES) -> dict[str, float | None]:
    """Return the last number of each of `LOGGED_COLUMNS`. None without a number.

    Raise UserError for a damaged file.
    """
    last_rows: dict[str, Row] = {}
    numbers: dict[str, float | None] = dict.fromkeys(LOGGED_COLUMNS)
    try:
        for row in read_rows(path, n_bytes) if path.exists() else []:
            for column in LOGGED_COLUMNS:
                if row.get(column):
                    last_rows[column] = row
        for column, row in last_rows.items():
            numbers[column] = parse_cell(row, column, path)
    except UserError:
        if n_bytes is None:
            raise
        return last_numbers(path, None)  # names the line by its number in the whole file
    return numbers


def age_of(folder: Path) -> float | None:
    """Return the seconds since the run wrote its metrics; without them its record."""
    for name in (METRICS, RECORD, CONFIG):
        if (folder / name).exists():
            return max(0.0, time.time() - (folder / name).stat().st_mtime)
    return None


def sort_overviews(overviews: list[Overview], key: str) -> list[Overview]:
    """Return the overviews in ascending order of a field.

    Runs without a value, and with NaN, come last.
    """

    def rank(overview: Overview) -> tuple[bool, Any]:
        value = getattr(overview, key)
        is_missing = value is None or (isinstance(value, float) and math.isnan(value))
        return is_missing, 0 if is_missing else value

    return sorted(overviews, key=rank)
