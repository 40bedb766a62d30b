"""Take over finished runs of other studies that have the same settings."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from anlit.compare.comparison import STEPS, STUDY, read_step_times
from anlit.io.write import write_json
from anlit.reporting.text import echo
from anlit.runs.folders import Run
from anlit.study.grid import GridPoint
from anlit.study.plan import PlannedRun, Study, hash_in_name
from anlit.study.record import read_record, restore
from anlit.study.results import read_selection
from anlit.study.state import read_state

PARTIAL_PREFIX = ".partial-"
"""Start of the name of a folder that is not complete yet."""


class ReusableRun(NamedTuple):
    """A finished run of another study."""

    source: Path
    """Its folder, or the report.json that records it."""
    recorded: Run | None
    """The recorded run. None for a folder."""


def find_reusable(
    runs: Sequence[PlannedRun], output: Path, studies: Sequence[Path]
) -> dict[str, ReusableRun]:
    """Find a finished run with the same hash for each run without a folder, by run name."""
    by_hash: dict[str, ReusableRun] = {}
    for study in studies:
        record = study / STUDY
        if not record.is_file():
            continue
        for name, run in read_record(study)[1].items():
            if run.complete:
                by_hash[hash_in_name(name)] = ReusableRun(record, run)
    # A folder wins over a record, and a folder of an earlier study over later studies.
    for study in reversed(studies):
        for folder in sorted(study.iterdir(), reverse=True):
            is_partial = folder.name.startswith(PARTIAL_PREFIX)
            if not is_partial and read_state(folder).status == "finished":
                by_hash[hash_in_name(folder.name)] = ReusableRun(folder, None)
    reusable: dict[str, ReusableRun] = {}
    for planned in runs:
        if planned.hash in by_hash and not (output / planned.name).exists():
            reusable[planned.name] = by_hash[planned.hash]
    return reusable


def selection_after_reuse(
    study: Study, output: Path, studies: Sequence[Path]
) -> dict[str, GridPoint]:
    """Select the points to measure as if the reusable tuning runs were taken over already."""
    runs = study.tuning_runs()
    reusable = find_reusable(runs, output, studies)
    if not reusable:
        return read_selection(study, output)
    with TemporaryDirectory() as name:
        preview = Path(name)
        for run in runs:
            source, recorded = reusable.get(run.name, (output / run.name, None))
            if recorded is not None:
                restore(recorded, preview / run.name, source)
            elif source.is_dir():
                (preview / run.name).symlink_to(source.resolve())
        return read_selection(study, preview)


def reuse(runs: Sequence[PlannedRun], output: Path, studies: Sequence[Path]) -> None:
    """Take over the reusable runs of other studies, and times of steps if `output` has none.

    Files become hard links, or copies across file systems.
    """
    for name, (source, recorded) in find_reusable(runs, output, studies).items():
        partial = output / (PARTIAL_PREFIX + name)
        shutil.rmtree(partial, ignore_errors=True)
        output.mkdir(parents=True, exist_ok=True)
        if recorded is None:
            shutil.copytree(source, partial, symlinks=True, copy_function=link_or_copy)
        else:
            restore(recorded, partial, source)
        # The time of the folder tells that results made from older runs are out of date.
        os.utime(partial)
        partial.rename(output / name)  # a kill before this line leaves no incomplete run
        echo(f"{name}: taken from {source}")
    if output.is_dir() and not (output / STEPS).exists():
        _take_step_times(output, studies)


def _take_step_times(output: Path, studies: Sequence[Path]) -> None:
    """Take over the first times of steps. A report checks whether they hold for its runs."""
    for study in studies:
        record = read_record(study)[0] if (study / STUDY).is_file() else {}
        steps = record.get("paired_steps") or read_step_times(study)
        if steps:
            write_json(output / STEPS, steps)
            return


def link_or_copy(source: str, target: str) -> None:
    """Make `target` a hard link to a file, or a copy across file systems."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
