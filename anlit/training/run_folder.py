"""The run folder of a command, and the checkpoint that it continues from or evaluates."""

import errno
import fcntl
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from lightning.pytorch.utilities import rank_zero_only

from anlit.checkpoints import location
from anlit.checkpoints.location import (
    BEST,
    BEST_THEN_LAST,
    CHECKPOINTS,
    LAST,
    checkpoint_of_run,
    complete_checkpoints,
)
from anlit.config.labels import CONFIG
from anlit.data.storage.manifest import TOKENIZER
from anlit.errors import UserError
from anlit.io.provenance import utc_time
from anlit.io.read import parse_cell, read_json, read_rows, read_yaml
from anlit.reporting.text import echo
from anlit.runs.folders import METRICS, RECORD, RECORD_SCHEMA

LOCK = ".fit.lock"
HPARAMS = "hparams.yaml"
TRACES = (LOCK, "events.out.tfevents.*", HPARAMS)
"""What a start leaves that was refused: the lock, and what loggers write."""
FILES = (
    LOCK,
    CONFIG,
    METRICS,
    RECORD,
    TOKENIZER,
    HPARAMS,
)
"""Files that a run writes, under its folder."""
MADE: set[str] = set()
"""The run folders that this process made."""
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_log = logging.getLogger(__name__)


def make_run_folder(run_dir: str) -> None:
    """Make the run folder; its ranks do this at the same time.

    Raises UserError if it cannot be made or written, or something in it is a link.
    """
    try:
        run_dir.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"run_dir={run_dir} is not valid UTF-8, which config.yaml is written in: choose another name"
        ) from error
    try:
        if not os.path.lexists(run_dir):
            MADE.add(run_dir)
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=run_dir).close()
    except OSError as error:
        fix = "choose a folder that you may write to"
        raise UserError(f"run_dir={run_dir} cannot be written ({error.strerror}): {fix}") from error
    for path in [*sorted(Path(run_dir).iterdir()), Path(run_dir) / CHECKPOINTS / location.SHARDED]:
        if path.is_symlink():  # metrics, records, the lock, events or checkpoints
            what = f"{path} is a link to {os.readlink(path)}, and a run writes into its own folder alone"
            raise UserError(f"{what}: replace it by a folder, or give the --run_dir where it leads")
    for name in FILES:
        if (path := Path(run_dir, name)).is_dir():
            raise UserError(f"{path} is a folder, and a run writes a file there: remove the folder")
    if (path := Path(run_dir, CHECKPOINTS)).is_file():
        raise UserError(f"{path} is a file, and a run needs a folder there: remove the file")


@rank_zero_only
def remove_traces(run_dir: str) -> None:
    """Remove the folder that this process made for a start that was refused, with its lock and loggers' files.

    Not one with a run's files, others or links, nor where another process trains.
    """
    paths = list(Path(run_dir).glob("*")) if run_dir in MADE else []
    if run_dir in MADE and all(
        any(map(path.match, TRACES)) and not path.is_symlink() for path in paths
    ):
        with suppress(OSError, UserError), lock_run_folder(run_dir):
            for path in {*paths, Path(run_dir, LOCK)}:
                path.unlink()
            Path(run_dir).rmdir()


def lock_run_folder(run_dir: str) -> IO[str]:
    """Lock the run folder for this process, until the returned file is closed or the process ends in any way.

    It is a record lock of the kernel (`lockf`), which data loader workers do not inherit, so a run that was killed can
    be continued at once. Between machines it works if the file system supports such locks: NFS (4, or 3 with lockd),
    GPFS, Lustre mounted with `flock`. Raises UserError if another process trains in this folder.
    """
    file = (Path(run_dir) / LOCK).open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            _log.warning(
                f"{run_dir} is on a file system without locks: start no second run in it while this one runs"
            )
            return file
        with file:
            file.seek(0)
            holder = file.read().strip() or "another process"
        fix = "wait for its end, or choose another --run_dir"
        raise UserError(f"run_dir={run_dir} is being trained in by {holder}: {fix}") from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {utc_time()}\n")
    file.flush()
    return file


def checkpoint_to_continue(
    run_dir: str, ckpt_path: str | None, every_n_steps: int, announce: bool = True
) -> str | None:
    """The checkpoint that `fit` continues from (`ckpt_path`: one, best, last or None), or "last"; None for a new run.

    `every_n_steps` are those between two last.ckpt. `announce` prints that a run begins anew.
    UserError if the checkpoint is missing, or the folder has files of a run and it is not one of the run's.
    """
    run = Path(run_dir)
    if ckpt_path == "last":
        _refuse_to_begin_anew(run, every_n_steps, announce)
        return ckpt_path
    if ckpt_path is None:
        _refuse_occupied(run, "")
        return None
    ckpt_path = str(run / CHECKPOINTS / BEST) if ckpt_path == "best" else ckpt_path
    location.refuse_address(ckpt_path)
    if not location.is_checkpoint(ckpt_path):
        what = "is no checkpoint" if Path(ckpt_path).exists() else "does not exist"
        raise UserError(
            f"ckpt_path={ckpt_path} {what}: give a file such as RUN/checkpoints/last.ckpt, or last"
        )
    own, given = (run / CHECKPOINTS).resolve(), Path(ckpt_path)
    if own not in (
        given.parent.resolve(),
        *given.resolve().parents,
    ):  # its name may be a link, or lie in `SHARDED`
        _refuse_occupied(run, f", and ckpt_path={ckpt_path} is not of it")
    return ckpt_path


@rank_zero_only
def _refuse_occupied(run: Path, why: str) -> None:
    """Refuse a folder with files that a run has written: only the run itself may write over them."""
    names = (
        CONFIG,
        METRICS,
        RECORD,
        *(path.name for path in run.glob("hpc_ckpt_*")),
    )  # which Lightning would load
    if complete_checkpoints(run / CHECKPOINTS) or any((run / name).exists() for name in names):
        checkpoint = location.name_to_continue(run / CHECKPOINTS)
        fix = f"continue it with --ckpt_path {checkpoint}, or choose another --run_dir"
        raise UserError(f"run_dir={run} already holds a run{why}: {fix}")


@rank_zero_only
def _refuse_to_begin_anew(run: Path, every_n_steps: int, announce: bool) -> None:
    """`last` begins at step 0 only if no last.ckpt was ever written.

    A run that was killed before its first checkpoint starts again. One is complete before the next is due.
    """
    if os.path.lexists(run / CHECKPOINTS / LAST):
        return
    others, metrics = complete_checkpoints(run / CHECKPOINTS), run / METRICS
    rows = read_rows(metrics) if metrics.exists() else []
    n_steps = max(
        (int(parse_cell(row, "step", metrics)) + 1 for row in rows if row["step"]), default=0
    )
    record = read_json(run / RECORD, RECORD_SCHEMA, missing={})
    is_of_run = bool(record) or not n_steps  # which writes its record first
    if (
        not others
        and is_of_run
        and n_steps <= 2 * every_n_steps
        and record.get("status") != "finished"
    ):
        if record and announce:
            echo(
                f"{run} was stopped before its first checkpoint was complete: it starts again at step 0"
            )
        return
    what = f"holds {others[0].relative_to(run)}" if others else f"holds {n_steps} logged steps"
    fix = f"put it back, or give {f'--ckpt_path {others[0]}' if others else 'another --run_dir'}"
    raise UserError(
        f"ckpt_path=last finds no {CHECKPOINTS}/{LAST} in run_dir={run}, which {what}: {fix}"
    )


def refuse_moved_run(run_dir: str, configs: list[str]) -> None:
    """Raise UserError if one of `configs` is the config.yaml of a run that was moved or copied from `run_dir`."""
    for folder in (Path(config).parent for config in configs if Path(config).name == CONFIG):
        is_elsewhere = (
            checkpoint_of_run(folder, (LAST,)) is not None
            and folder.resolve() != Path(run_dir).resolve()
        )
        if is_elsewhere and read_yaml(folder / CONFIG, dict).get("run_dir") == run_dir:
            what = f"{folder}/{CONFIG} has run_dir={run_dir}, which is not the run's own folder"
            raise UserError(f"{what}: give --run_dir {folder}, or --config {run_dir}/{CONFIG}")


def checkpoint_to_evaluate(
    ckpt_path: str | None, run_dir: str | None, configs: list[str], command: str
) -> str:
    """The checkpoint of `ckpt_path`; for None, `best` and `last` a checkpoint of the configuration's run.

    Args:
        ckpt_path: A checkpoint, a run folder, best, last, or None for the best checkpoint, else the last.
        run_dir: The configuration's run folder.
        configs: The configuration files. If a run was moved, one of them is in its folder.
        command: validate or test, for the UserError where there is none.
    """
    if ckpt_path not in (None, "best", "last"):
        location.refuse_address(ckpt_path)
        if location.is_exported(ckpt_path):
            fix = "give the run's checkpoint, or use anlit lengths"
            raise UserError(
                f"ckpt_path={ckpt_path} is an exported model, which anlit {command} does not read: {fix}"
            )
        return str(location.find_checkpoint(ckpt_path))
    names = {None: BEST_THEN_LAST, "best": (BEST,), "last": (LAST,)}[ckpt_path]
    folders = list(
        dict.fromkeys(
            [*(Path(config).parent for config in configs), *([Path(run_dir)] if run_dir else [])]
        )
    )
    if files := [
        file for folder in folders if (file := checkpoint_of_run(folder, names)) is not None
    ]:
        return str(files[0])
    searched = " or ".join(str(folder / CHECKPOINTS) for folder in folders) or "any run"
    wanted = f"ckpt_path={ckpt_path}" if ckpt_path else f"anlit {command} without --ckpt_path"
    fix = f"give a trained run, anlit {command} RUN, or --ckpt_path RUN/checkpoints/best.ckpt"
    raise UserError(f"{wanted} finds no {' or '.join(names)} in {searched}: {fix}")
