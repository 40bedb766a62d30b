"""The run folder of a command, and the checkpoint that the command continues from or evaluates."""

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
from anlit.checkpoints.newest import checkpoints_to_continue, name_to_continue
from anlit.checkpoints.special_tokens import GENERATION_CONFIG, TOKENIZER_CONFIG
from anlit.config.labels import CONFIG
from anlit.data.storage.manifest import TOKENIZER
from anlit.errors import UserError
from anlit.io.metrics_csv import parse_cell, read_rows
from anlit.io.provenance import utc_time
from anlit.io.read import read_yaml
from anlit.reporting.text import echo
from anlit.runs.folders import METRICS, RECORD, SAMPLES, read_run_record
from anlit.training.loggers import HPARAMS_FILE, WANDB_RUN_ID

FIT_LOCK = ".fit.lock"
"""The file that a training process locks."""
RUN_FILES = (FIT_LOCK, CONFIG, METRICS, RECORD, SAMPLES, TOKENIZER, HPARAMS_FILE, WANDB_RUN_ID)
"""Files that a run writes into its folder."""
REMOVABLE = (*RUN_FILES, TOKENIZER_CONFIG, GENERATION_CONFIG, "events.out.tfevents.*")
"""Patterns of the files that a refused start leaves."""
CREATED: set[str] = set()
"""The run folders that this process made."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of a file system that has no locks."""
_log = logging.getLogger(__name__)


def make_run_folder(run_dir: str) -> None:
    """Make the run folder. All ranks do this at the same time.

    Raises UserError if the folder cannot be made or written. Links in it are refused too.
    """
    try:
        if not os.path.lexists(run_dir):
            CREATED.add(run_dir)
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=run_dir).close()
    except OSError as error:
        raise UserError(
            f"run_dir={run_dir} cannot be written ({error.strerror}): choose a folder that you "
            "may write to"
        ) from error
    _refuse_links(Path(run_dir))
    _refuse_other_kinds(Path(run_dir))


def _refuse_links(run: Path) -> None:
    """Raise UserError if metrics, records, the lock, events or checkpoints are links."""
    for path in [*sorted(run.iterdir()), run / CHECKPOINTS / location.SHARDED]:
        if path.is_symlink():
            raise UserError(
                f"{path} is a link to {os.readlink(path)}, and a run writes into its own folder "
                "alone: replace it by a folder, or give the --run_dir where it leads"
            )


def _refuse_other_kinds(run: Path) -> None:
    """Raise UserError for a folder in place of a file, or the reverse."""
    for name in RUN_FILES:
        if (run / name).is_dir():
            raise UserError(
                f"{run / name} is a folder, and a run writes a file there: remove the folder"
            )
    if (run / CHECKPOINTS).is_file():
        raise UserError(
            f"{run / CHECKPOINTS} is a file, and a run needs a folder there: remove the file"
        )


@rank_zero_only
def remove_refused_start(run_dir: str) -> None:
    """Remove the folder that this process made for a start that was refused before its first step.

    The folder stays if it has checkpoints, foreign files or links. It also stays if another process
    trains in it.
    """
    if run_dir not in CREATED or _has_trained(Path(run_dir)):
        return
    paths = list(Path(run_dir).glob("*"))
    if not all(map(_is_removable, paths)):
        return
    with suppress(OSError, UserError), lock_run_folder(run_dir):
        for path in {*paths, Path(run_dir, FIT_LOCK)}:
            path.unlink()
        Path(run_dir).rmdir()


def _has_trained(run: Path) -> bool:
    """Whether a batch was trained on: then the record lists the kernels of attention, if any."""
    record = read_run_record(run)
    return record.get("attention") is not None


def _is_removable(path: Path) -> bool:
    return any(map(path.match, REMOVABLE)) and not path.is_symlink()


def lock_run_folder(run_dir: str) -> IO[str]:
    """Lock the run folder until the returned file is closed or this process ends.

    It is a record lock of the kernel (`lockf`). Data loader workers do not inherit it. So a killed
    run can be continued at once. Between machines the file system must support such locks. NFS (4,
    or 3 with lockd), GPFS and Lustre mounted with `flock` do.

    Raises UserError if another process trains in this folder.
    """
    file = (Path(run_dir) / FIT_LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            _log.warning(
                f"{run_dir} is on a file system without locks: start no second run in it while "
                "this one runs"
            )
            return file
        with file:
            file.seek(0)
            holder = file.read().strip() or "another process"
        raise UserError(
            f"run_dir={run_dir} is being trained in by {holder}: wait for its end, or choose "
            "another --run_dir"
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {utc_time()}\n")
    file.flush()
    return file


def checkpoint_to_continue(
    run_dir: str, ckpt_path: str | None, every_n_steps: int, announce: bool = True
) -> str | None:
    """The checkpoint that `fit` continues from, or "last"; None for a new run.

    Args:
        ckpt_path: A checkpoint, best, last or None.
        every_n_steps: Steps between two writes of last.ckpt.
        announce: Whether to print that a run begins anew.

    Raises:
        UserError: The checkpoint is missing, or the folder has files of another run.
    """
    run = Path(run_dir)
    if ckpt_path == "last":
        _refuse_to_begin_anew(run, every_n_steps, announce)
        return ckpt_path
    if ckpt_path is None:
        _refuse_occupied(run)
        return None
    ckpt_path = str(run / CHECKPOINTS / BEST) if ckpt_path == "best" else ckpt_path
    location.refuse_address(ckpt_path)
    location.refuse_transformers(ckpt_path)
    if location.is_exported(ckpt_path):
        raise UserError(
            f"ckpt_path={ckpt_path} is an exported model, which has no optimizer's state to "
            f"continue with: begin a run from it with --initial_weights {ckpt_path}"
        )
    if not location.is_checkpoint(ckpt_path):
        problem = "is not a checkpoint" if Path(ckpt_path).exists() else "does not exist"
        raise UserError(
            f"ckpt_path={ckpt_path} {problem}: give a run folder, a file such as "
            "RUN/checkpoints/last.ckpt, or last"
        )
    # The checkpoint's name may be a link in the run's folder, or a folder in `SHARDED`.
    folders = [Path(ckpt_path).parent.resolve(), *Path(ckpt_path).resolve().parents]
    if (run / CHECKPOINTS).resolve() not in folders:
        _refuse_occupied(run, f", and ckpt_path={ckpt_path} is not of it")
    return ckpt_path


def holds_run(run: Path) -> bool:
    """Whether a folder has files of a run, over which no other run may write."""
    names = [CONFIG, METRICS, RECORD]
    names += [path.name for path in run.glob("hpc_ckpt_*")]  # Lightning would load them
    return bool(complete_checkpoints(run / CHECKPOINTS)) or any(
        (run / name).exists() for name in names
    )


@rank_zero_only
def _refuse_occupied(run: Path, detail: str = "") -> None:
    """Refuse a folder with files of a run. Only this run may write over them."""
    if holds_run(run):
        checkpoint = name_to_continue(run / CHECKPOINTS)
        raise UserError(
            f"run_dir={run} already holds a run{detail}: continue it with --ckpt_path "
            f"{checkpoint}, or choose another --run_dir"
        )


@rank_zero_only
def _refuse_to_begin_anew(run: Path, every_n_steps: int, announce: bool) -> None:
    """Let `last` begin at step 0 only if last.ckpt was never written.

    A run that was killed before its first checkpoint starts again. A checkpoint is complete before
    the next is due.
    """
    if os.path.lexists(run / CHECKPOINTS / LAST):
        return
    checkpoints = checkpoints_to_continue(run / CHECKPOINTS)
    n_steps = _logged_steps(run / METRICS)
    record = read_run_record(run)
    has_steps_of_run = bool(record) or not n_steps  # a run writes its record first
    is_before_checkpoint = n_steps <= 2 * every_n_steps and record.get("status") != "finished"
    if not checkpoints and has_steps_of_run and is_before_checkpoint:
        if announce:
            cause = "has no checkpoint: training starts"
            if record:
                cause = "was stopped before its first checkpoint was complete: it starts again"
            echo(f"{run} {cause} at step 0")
        return
    if checkpoints:
        content = str(checkpoints[0].relative_to(run))
        fix = f"put it back, or give --ckpt_path {checkpoints[0]}"
    else:
        content = f"{n_steps} logged steps"
        fix = "put it back, or give another --run_dir"
    raise UserError(
        f"ckpt_path=last finds no {CHECKPOINTS}/{LAST} in run_dir={run}, which holds {content}: "
        f"{fix}"
    )


def _logged_steps(metrics: Path) -> int:
    """The number of steps that metrics.csv has; 0 without the file."""
    if not metrics.exists():
        return 0
    n_steps = 0
    for row in read_rows(metrics):
        if row["step"]:
            n_steps = max(n_steps, int(parse_cell(row, "step", metrics)) + 1)
    return n_steps


def refuse_moved_run(run_dir: str, configs: list[str]) -> None:
    """Raise UserError if a file of `configs` is of a run moved or copied from `run_dir`."""
    for config in map(Path, configs):
        if config.name != CONFIG:
            continue
        folder = config.parent
        is_run = checkpoint_of_run(folder, (LAST,)) is not None
        is_elsewhere = folder.resolve() != Path(run_dir).resolve()
        if is_run and is_elsewhere and read_yaml(config, dict).get("run_dir") == run_dir:
            fix = f"give --run_dir {folder}"
            if (Path(run_dir) / CONFIG).is_file():
                fix += f", or --config {run_dir}/{CONFIG}"
            raise UserError(
                f"{folder} was moved or copied, because its {CONFIG} has run_dir={run_dir}: {fix}"
            )


def checkpoint_to_evaluate(
    ckpt_path: str | None, run_dir: str | None, configs: list[str], command: str
) -> str:
    """The checkpoint of `ckpt_path`; for None, `best` and `last` a checkpoint of the run.

    Args:
        ckpt_path: A checkpoint, a run folder, best, last, or None for the best, else the last.
        run_dir: The configuration's run folder.
        configs: The configuration files. If a run was moved, its folder has one of them.
        command: validate or test, for the UserError if the run has no checkpoint.
    """
    if ckpt_path not in (None, "best", "last"):
        location.refuse_address(ckpt_path)
        location.refuse_transformers(ckpt_path)
        if location.is_exported(ckpt_path):
            raise UserError(
                f"ckpt_path={ckpt_path} is an exported model, which anlit {command} does not "
                "read: give the run's checkpoint, or use anlit lengths"
            )
        return str(location.find_checkpoint(ckpt_path))
    names = {None: BEST_THEN_LAST, "best": (BEST,), "last": (LAST,)}[ckpt_path]
    folders = [Path(config).parent for config in configs]
    if run_dir:
        folders.append(Path(run_dir))
    folders = list(dict.fromkeys(folders))
    for folder in folders:
        file = checkpoint_of_run(folder, names)
        if file is not None:
            return str(file)
    searched = " or ".join(str(folder / CHECKPOINTS) for folder in folders) or "any run"
    subject = f"ckpt_path={ckpt_path}" if ckpt_path else f"anlit {command} without --ckpt_path"
    raise UserError(
        f"{subject} finds no {' or '.join(names)} in {searched}: give a trained run, anlit "
        f"{command} RUN, or --ckpt_path RUN/checkpoints/best.ckpt"
    )
