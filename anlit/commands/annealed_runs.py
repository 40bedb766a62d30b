"""Gives each annealed run of a study the checkpoint that it begins from.

It becomes the `last.ckpt` of the run's folder. So the run is any run that continues with another
schedule, here and on a cluster.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from anlit.checkpoints.location import CHECKPOINTS, LAST, STEP_NAME, is_checkpoint, is_sharded
from anlit.study.plan import AnnealedRun, PlannedRun
from anlit.study.reuse import PARTIAL_PREFIX, link_or_copy
from anlit.study.state import note_failure, read_state


def begin_annealed_runs(runs: Sequence[PlannedRun], output: Path) -> None:
    """Give the annealed runs among `runs` that have not begun their checkpoints.

    A run without a checkpoint fails. Its stable run ended before, or was restored from a record.
    """
    for run in runs:
        if not isinstance(run, AnnealedRun):
            continue
        folder = output / run.name
        last = folder / CHECKPOINTS / LAST
        if is_checkpoint(last) or read_state(folder).has_ended:
            continue
        name = f"{STEP_NAME.format(step=run.n_stable)}.ckpt"
        source = output / run.stable.name / CHECKPOINTS / name
        if is_checkpoint(source):
            place(source, last)
        else:
            note_failure(folder, f"{source} does not exist: anneal needs it to begin")


def place(source: Path, target: Path) -> None:
    """Make the checkpoint `source` also the checkpoint `target`, complete or not at all.

    Its files become hard links, or copies across file systems: no checkpoint is written in place.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(PARTIAL_PREFIX + target.name)
    if is_sharded(source):
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial, copy_function=link_or_copy)
    else:
        partial.unlink(missing_ok=True)
        link_or_copy(str(source), str(partial))
    partial.rename(target)
