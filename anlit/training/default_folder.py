"""The default run folder: `runs/NAME`, and for a further try `runs/NAME-2`, `runs/NAME-3` …

Only a new run takes a number. `last` and `best` are of `runs/NAME`. So a job that its cluster
starts again goes on in the same folder.
"""

import os
from itertools import count
from pathlib import Path
from typing import IO

from lightning.fabric.plugins.environments import (
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.utilities import rank_zero_only

from anlit.errors import UserError
from anlit.reporting.text import echo
from anlit.runs.folders import read_run_record
from anlit.training.run_folder import holds_run, lock_run_folder, make_run_folder

RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
"""Environment variables: how often a cluster or torchrun has started this job again."""
LAUNCHERS = (
    TorchElasticEnvironment,
    SLURMEnvironment,
    LSFEnvironment,
    MPIEnvironment,
)
"""Environments in which something else starts all processes of a run."""
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK")
"""Environment variables that number the processes or machines of a run."""
FIRST_NUMBER = 2
"""The number of the second try."""


def default_run_folder(
    folder: str, ckpt_path: str | None, n_nodes: int = 1
) -> tuple[str, IO[str] | None]:
    """Return the folder of a run whose --run_dir is not given, and perhaps its lock.

    All ranks find the same folder without asking each other. The files that they look for are
    written when all ranks train. `RunRecord` compares the folders of the ranks nevertheless. A
    process that starts alone locks the folder of a new run. If two runs start together, the second
    takes the next number.

    Args:
        folder: The folder of the first try.
        ckpt_path: A checkpoint, last, best or None.
        n_nodes: The machines that take part.
    """
    if ckpt_path in ("last", "best"):
        if holds_run(Path(numbered(folder, FIRST_NUMBER))):
            _say_which_is_continued(folder, str(ckpt_path))
        return folder, None
    if ckpt_path is not None:
        run = _run_of_checkpoint(ckpt_path)
        if run is not None and _is_try_of(run, folder):
            return str(run), None
    if _is_started_again():
        return folder, None
    return _free_folder(folder, n_nodes == 1 and _starts_alone())


def numbered(folder: str, number: int) -> str:
    return folder if number < FIRST_NUMBER else f"{folder}-{number}"


def _free_folder(folder: str, locks: bool) -> tuple[str, IO[str] | None]:
    """Return the first numbered folder without a run, and its lock if `locks`.

    With `locks` a folder in which another process is about to train is not free.
    """
    for number in count(1):
        candidate = numbered(folder, number)
        if holds_run(Path(candidate)):
            continue
        lock = None
        if locks:
            make_run_folder(candidate)
            try:
                lock = lock_run_folder(candidate)
            except UserError:  # the other process has written no file yet
                continue
        if number >= FIRST_NUMBER:
            _say_what_is_taken(candidate, folder)
        return candidate, lock
    raise AssertionError("the numbers have no end")


@rank_zero_only
def _say_what_is_taken(taken: str, folder: str) -> None:
    record = read_run_record(Path(folder))
    echo(
        f"{folder} holds a run ({record.get('status') or 'not yet recorded'}), so this run takes "
        f"{taken}: continue it with --run_dir {taken} --ckpt_path last, the other with "
        "--ckpt_path last alone"
    )


def _run_of_checkpoint(ckpt_path: str) -> Path | None:
    """Return the run folder of a checkpoint by its path: RUN, or RUN/checkpoints/FILE."""
    path = Path(ckpt_path)
    return path.parent.parent if path.suffix == ".ckpt" else None


def _is_try_of(run: Path, folder: str) -> bool:
    """Whether a run folder is `folder`, or `folder` with a number."""
    if run.resolve() == Path(folder).resolve():
        return True
    beginning, _, number = run.name.rpartition("-")
    is_beside = run.with_name(beginning or run.name).resolve() == Path(folder).resolve()
    return is_beside and number.isdecimal()


def _say_which_is_continued(folder: str, ckpt_path: str) -> None:
    second = numbered(folder, FIRST_NUMBER)
    rank_zero_only(echo)(
        f"ckpt_path={ckpt_path} is of {folder}: for {second} give --run_dir {second} too"
    )


def _starts_alone() -> bool:
    """Whether no other process of this run starts now. Lightning may start some later."""
    is_launched = any(launcher.detect() for launcher in LAUNCHERS)
    return not is_launched and not any(name in os.environ for name in RANKS)


def _is_started_again() -> bool:
    return any(os.environ.get(name, "0") not in ("", "0") for name in RESTARTS)
