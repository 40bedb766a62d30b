"""Turns what ends a training run, and is no mistake in the code, into one sentence."""

import errno
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from anlit.checkpoints.writing import first_cause
from anlit.errors import RUN_FOLDER, RunError, UserError, chain_of

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the operating system says where a disk, a quota or the limit of a file's size is used up."""
CONTINUE = "then continue with --ckpt_path last"
LOST_WORKER = re.compile(r"DataLoader worker .*?(killed by signal: [\w ]+|exited unexpectedly)")


def run_error(error: Exception) -> RunError | None:
    """Return the sentence for an error of the machine, None for any other error.

    A library may raise its own error from it: a lost data worker interrupts whatever the run does at that moment.
    """
    for link in chain_of(error):
        if isinstance(link, UserError):  # a sentence already
            return None
        if (sentence := _run_error(link)) is not None:
            return sentence
    return None


def _run_error(error: BaseException) -> RunError | None:
    text = str(error)
    if isinstance(error, OSError):
        return _of_files(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        fix = "lower data.batch_size and raise trainer.accumulate_grad_batches"
        return RunError(f"memory is exhausted ({first_cause(error)}): {fix}, {CONTINUE}")
    if not isinstance(error, RuntimeError):
        return None
    if "can't start new thread" in text:
        fix = "raise the limit of processes (ulimit -u)"
        return RunError(f"no further thread can be started: {fix}, {CONTINUE}")
    if lost := LOST_WORKER.search(text):
        fix = "free memory, or lower data.num_workers"
        return RunError(f"a process of data.num_workers was lost ({lost[1]}): {fix}, {CONTINUE}")
    if "by peer" in text:  # gloo's words; NCCL's abort the process
        cause = first_cause(error)
        return RunError(
            f"another rank of the run has ended ({cause}): continue with --ckpt_path last"
        )
    return None


def _of_files(error: OSError) -> RunError | None:
    """The sentence for a full disk, or for a file of the run folder that cannot be written."""
    path, run_dir = error.filename, RUN_FOLDER.get()
    is_of_run = bool(path and run_dir) and Path(run_dir) in Path(str(path)).parents
    if error.errno not in FULL and not is_of_run:
        return None
    fix = "make room" if error.errno in FULL else "repair the folder"
    what = f"{path or 'the run folder'} could not be written ({error.strerror or error})"
    return RunError(f"{what}: {fix}, {CONTINUE}")


@contextmanager
def quiet_log_threads() -> Iterator[None]:
    """Print no traceback of a thread that cannot write: TensorBoard's tells the main thread too."""
    before = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if not isinstance(arguments.exc_value, OSError):
            before(arguments)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before
