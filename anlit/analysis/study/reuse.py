"""Reuses finished runs of other studies that have all settings of a run of this study."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from anlit.analysis.study.plan import Trial
from anlit.analysis.study.state import state_of

PARTIAL = ".partial-"


def reuse(runs: Sequence[Trial], output: Path, studies: Sequence[Path], tell: Callable[[str], None]) -> None:
    """Give each run that has not begun the finished run with its settings from one of `studies`, folders of studies.

    Two runs are the same if the hashes in their folders' names are equal. The hash is of all settings and configuration
    files. It does not include the code, whose commit the report lists for each run. Files become hard links, or copies
    on another file system.
    """
    found: dict[str, Path] = {}
    for study in studies:
        for folder in sorted(study.iterdir()):
            if not folder.name.startswith(PARTIAL) and state_of(folder).status == "finished":
                found.setdefault(settings_hash(folder.name), folder)
    for run in runs:
        source, folder = found.get(settings_hash(run.name)), output / run.name
        if source is not None and not folder.exists():
            _link(source, folder)
            tell(f"{run.name}: taken from {source}")


def settings_hash(name: str) -> str:
    """The end of `Trial.name`."""
    return name.rpartition("-")[2]


def _link(source: Path, folder: Path) -> None:
    """Copy under another name first, so that a kill leaves no half of a run."""
    partial = folder.with_name(PARTIAL + folder.name)
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, symlinks=True, copy_function=_link_file)
    partial.rename(folder)


def _link_file(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
