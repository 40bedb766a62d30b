"""Turns an error of the machine that ends a training run into one sentence."""

import re
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anlit.checkpoints.writing import first_cause
from anlit.config.trackers import tracker_error
from anlit.errors import (
    FULL_DISK_CODES,
    RUN_FOLDER,
    WORKER_FIX,
    RunError,
    UserError,
    error_chain,
    is_out_of_memory,
)

CONTINUE = "then continue with --ckpt_path last"
NO_COMPILER = re.compile(
    r"Failed to find C compiler|Command '\['\S+', '\S+\.c'.*?non-zero exit status"
)
"""Triton's texts if it cannot compile the C code that launches its kernels. There is no compiler,
or the compiler does not find Python.h."""
DATA_LOADER_START = "_get_iterator"
"""The method of DataLoader that starts its workers."""
SHARED_MEMORY = re.compile(r"unable to [^<>]*</torch_\w+>[^:]*: ([\w ]+) \(\d+\)")
"""torch's texts if processes cannot share a tensor, with the system's reason."""
LOST_WORKER = re.compile(r"DataLoader worker .*?(killed by signal: [\w ]+|exited unexpectedly)")
LOST_RANK = re.compile(r"Connection \w+ by peer")
"""gloo's texts if a rank has ended; NCCL aborts the process. What follows, a port, differs."""


def run_error(error: Exception) -> RunError | None:
    """Return the sentence for an error of the machine or of a tracker, None for any other error.

    A library may raise its own error from it: a lost data worker interrupts the run anywhere.
    """
    for link in error_chain(error):
        if isinstance(link, UserError):  # a sentence already
            return None
        machine_error = _worker_start_error(link) or _machine_error(link)
        if machine_error is not None:
            return machine_error
    return tracker_error(error)


def _worker_start_error(error: BaseException) -> RunError | None:
    """Return the sentence if a user's DataLoader could not start its worker processes.

    Lightning then raises an error of its own, which says nothing of it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if all(frame.name != DATA_LOADER_START for frame in frames):
        return None
    if isinstance(error, OSError):
        return RunError(f"a data worker cannot be started ({error.strerror}): {WORKER_FIX}")
    if "pickle" in str(error):
        fix = "define it at the top of a module, or leave multiprocessing_context out"
        return RunError(f"a data worker cannot be sent what its DataLoader has ({error}): {fix}")
    return None


def _machine_error(error: BaseException) -> RunError | None:
    """Return the sentence for this error alone, without its causes."""
    text = str(error)
    if isinstance(error, OSError):
        return _file_error(error)
    if is_out_of_memory(error):
        fix = "lower data.batch_size and raise trainer.accumulate_grad_batches"
        return RunError(f"memory is exhausted ({first_cause(error)}): {fix}, {CONTINUE}")
    if NO_COMPILER.search(text):
        fix = "install a C compiler and the headers of this Python (gcc, python3-dev)"
        return RunError(f"kernels for the GPU could not be compiled: {fix}, {CONTINUE}")
    if not isinstance(error, RuntimeError):
        return None
    if "can't start new thread" in text:
        fix = "raise the limit of processes (ulimit -u)"
        return RunError(f"no further thread can be started: {fix}, {CONTINUE}")
    shared_memory = SHARED_MEMORY.search(text)
    if shared_memory:
        cause = shared_memory[1]
        return RunError(f"a data worker cannot share a batch ({cause}): {WORKER_FIX}, {CONTINUE}")
    lost_worker = LOST_WORKER.search(text)
    if lost_worker:
        cause = lost_worker[1]
        fix = "free memory, enlarge /dev/shm, or lower data.num_workers"
        return RunError(f"a process of data.num_workers was lost ({cause}): {fix}, {CONTINUE}")
    lost_rank = LOST_RANK.search(text)
    if lost_rank:
        cause = lost_rank[0]
        fix = "continue with --ckpt_path last"
        return RunError(f"another rank of the run has ended ({cause}): {fix}")
    return None


def _file_error(error: OSError) -> RunError | None:
    """Return the sentence for a full disk, or for a lost file of the run folder."""
    path, run_dir = error.filename, RUN_FOLDER.get()
    is_of_run = bool(path and run_dir) and Path(run_dir) in Path(str(path)).parents
    is_full = error.errno in FULL_DISK_CODES
    if not is_full and not is_of_run:
        return None
    fix = "make room" if is_full else "repair the folder"
    cause = f"{path or 'the run folder'} could not be written ({error.strerror or error})"
    return RunError(f"{cause}: {fix}, {CONTINUE}")


@contextmanager
def ignore_thread_write_errors() -> Iterator[None]:
    """Print no traceback of a thread that cannot write.

    TensorBoard's thread raises the error in the main thread too.
    """
    previous_hook = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if not isinstance(arguments.exc_value, OSError):
            previous_hook(arguments)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = previous_hook
