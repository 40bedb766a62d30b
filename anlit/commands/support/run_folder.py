"""Protects run folders: one process at a time, and no run is started again by mistake."""

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import IO

from lightning.pytorch.utilities import rank_zero_only

from anlit.checkpoints.location import CHECKPOINTS, LAST, complete_checkpoints
from anlit.errors import UserError
from anlit.reading import number, read_json, read_rows
from anlit.reporting.provenance import now
from anlit.reporting.text import echo
from anlit.runs.folders import METRICS, RECORD, RECORD_SCHEMA

LOCK = ".fit.lock"
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_log = logging.getLogger(__name__)


def hold(run_dir: str) -> IO[str]:
    """Lock the run folder for this process, until the returned file is closed or the process ends in any way.

    It is a record lock of the kernel (`lockf`). Forked processes, such as data loader workers, do not inherit it, so a
    run that was killed can be continued at once. Between machines it works if the file system supports such locks: NFS
    (4, or 3 with lockd), GPFS, Lustre mounted with `flock`. If not, a warning says that the folder is not locked. The
    lock of `anlit study` is another one, which also covers the time before a run has this lock.

    Raises:
        UserError: Another process trains in this folder.
    """
    file = (Path(run_dir) / LOCK).open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            _log.warning(f"{run_dir} is on a file system without locks: start no second run in it while this one runs")
            return file
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise UserError(
            f"run_dir={run_dir} is being trained in by {holder}: wait for its end, or choose another --run_dir"
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {now()}\n")
    file.flush()
    return file


@rank_zero_only
def refuse_lost_checkpoint(run_dir: str, every_n_steps: int) -> None:
    """Let `--ckpt_path last` start at step 0 only if no last.ckpt was ever written, for example in a new folder.

    A run that was killed before its first checkpoint starts again.

    Args:
        every_n_steps: Optimizer steps between two checkpoints. One is complete before the next is due.

    Raises:
        UserError: last.ckpt is missing.
    """
    folder = Path(run_dir)
    if os.path.lexists(folder / CHECKPOINTS / LAST):
        return
    others = complete_checkpoints(folder / CHECKPOINTS)
    n_steps = _steps_logged(folder / METRICS)
    if not others and n_steps <= 2 * every_n_steps and not _is_finished(folder / RECORD):
        if (folder / RECORD).is_file():
            echo(f"{run_dir} was stopped before its first checkpoint was complete: it starts again at step 0")
        return
    what = f"holds {others[0].relative_to(folder)}" if others else f"holds {n_steps} logged steps"
    instead = f"--ckpt_path {others[0]}" if others else "another --run_dir"
    raise UserError(
        f"ckpt_path=last finds no {CHECKPOINTS}/{LAST} in run_dir={run_dir}, which {what}: put it back, or give "
        f"{instead}"
    )


def _steps_logged(metrics: Path) -> int:
    rows = read_rows(metrics) if metrics.exists() else []
    return max((int(number(row, "step", metrics)) + 1 for row in rows if row["step"]), default=0)


def _is_finished(record: Path) -> bool:
    return record.exists() and read_json(record, RECORD_SCHEMA).get("status") == "finished"
