"""Where tasks run: in this process, in worker processes of this machine, or on a Dask cluster."""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    ProcessPoolExecutor,
    as_completed,
)
from contextlib import AbstractContextManager, contextmanager, nullcontext

from anlit.data.preparation.encode import encode_task
from anlit.data.preparation.sources import SourceFile
from anlit.data.preparation.tasks import Job, Task
from anlit.data.storage.manifest import TASKS
from anlit.errors import WORKER_FIX, RunError, UserError
from anlit.packages import install_advice
from anlit.reporting.text import say
from anlit.signals import leave_signals_to_parent, signals_held

LINE_EVERY_SECONDS = 30
"""Time between two lines of progress."""
SCHEDULER_SECONDS = 10
"""Time in which a Dask scheduler has to answer."""
PR_SET_PDEATHSIG = 1
"""Option of prctl(2): Linux sends a process a signal when the process that started it ends."""


def run_tasks(job: Job, is_done: Mapping[Task, bool], workers: int, cluster: str | None) -> None:
    """Encode the tasks that are not done, in any order, where `workers` and `cluster` say.

    Raises the errors of `encode_task`, UserError if there is no such cluster, and BrokenExecutor if
    a worker is killed.
    """
    tasks = [task for task, done in is_done.items() if not done]
    unread_pieces = Counter[SourceFile]()
    for task in tasks:
        unread_pieces.update(piece.file for piece in task.pieces)
    progress = _Progress(sum(task.size for task in is_done), sum(task.size for task in tasks))
    with _executor(min(workers, len(tasks)), cluster) as executor:
        for task, n_tokens in _results(executor, job, tasks):
            for piece in task.pieces:
                unread_pieces[piece.file] -= 1
                if unread_pieces[piece.file] == 0:
                    job.source.release(piece.file, job.folder / TASKS)
            progress.advance(task, n_tokens)


class _Progress:
    """A line of text every `LINE_EVERY_SECONDS`. Sizes are bytes of the source files."""

    def __init__(self, size: int, waiting_size: int) -> None:
        self.size = size
        self.waiting_size = waiting_size
        self.read_size = 0  # by this command
        self.n_tokens = 0
        self.start = time.monotonic()
        self.last_line = self.start

    def advance(self, task: Task, n_tokens: int) -> None:
        """Count a task that is done, with its tokens."""
        self.waiting_size -= task.size
        self.read_size += task.size
        self.n_tokens += n_tokens
        now = time.monotonic()
        if now - self.last_line > LINE_EVERY_SECONDS:
            self.last_line = now
            seconds = now - self.start
            done = 1 - self.waiting_size / self.size
            minutes = self.waiting_size / self.read_size * seconds / 60
            say(
                f"{done:.1%}, {self.n_tokens:,} tokens, {self.n_tokens / seconds:,.0f} tokens/s, "
                f"{minutes:,.0f} min left"
            )


def _results(
    executor: Executor | None, job: Job, tasks: Sequence[Task]
) -> Iterator[tuple[Task, int]]:
    """Yield each task when it is done, with its number of tokens."""
    if executor is None:
        for task in tasks:
            yield task, encode_task(job, task)
        return
    with signals_held():
        futures = {executor.submit(_encode_in_worker, job, task): task for task in tasks}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        for future in futures:
            future.cancel()


def _encode_in_worker(job: Job, task: Task) -> int:
    """Call `encode_task` on one core."""
    # The tokenizers library would start as many threads as there are cores. It hangs in a forked
    # process if the parent has used its threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return encode_task(job, task)


def _executor(workers: int, cluster: str | None) -> AbstractContextManager[Executor | None]:
    """Return the executor that tasks run on. None if they run in this process."""
    if cluster is not None:
        return _cluster(cluster)
    return _processes(workers) if workers > 1 else nullcontext()


@contextmanager
def _processes(workers: int) -> Iterator[Executor]:
    """Yield worker processes. After an error they finish their tasks. A signal kills them."""
    # Forked, they start in 0.1 s, spawned in seconds; they use nothing but files and tokenizers.
    context = multiprocessing.get_context("fork")
    try:
        executor = ProcessPoolExecutor(
            workers, context, initializer=_start_worker, initargs=(os.getpid(),)
        )
        with signals_held():
            executor.submit(int)  # the first task starts all processes
    except OSError as error:
        raise RunError(
            f"the {workers} processes of --workers cannot be started ({error.strerror}): "
            f"{WORKER_FIX}, or give --workers 1"
        ) from error
    with executor as pool:
        try:
            yield pool
        except KeyboardInterrupt:
            # terminate() is not enough: the system drops its SIGTERM if a SIGTERM still waits.
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _start_worker(parent: int) -> None:
    leave_signals_to_parent()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before that call, and no signal will come
        os._exit(1)


@contextmanager
def _cluster(address: str) -> Iterator[Executor]:
    """Yield the workers of a Dask scheduler. A task of a worker that is lost runs a second time."""
    try:
        from distributed import Client, KilledWorker
        from distributed.comm import CommClosedError

        asyncio.run(_contact(address))
        client = Client(address, timeout=SCHEDULER_SECONDS)
    except ImportError as error:
        raise UserError(
            f"--cluster needs Dask: {install_advice('cluster', 'distributed')}"
        ) from error
    except (OSError, ValueError, TypeError) as error:  # TypeError: TLS without certificates
        raise UserError(
            f"No Dask scheduler answers at --cluster {address}: start one with `dask scheduler`, "
            "and give the address that it prints, such as tcp://127.0.0.1:8786; tls:// needs "
            "certificates in Dask's configuration (distributed.comm.tls)"
        ) from error
    with client:
        try:
            yield client.get_executor(pure=False, retries=1)
        except KilledWorker as error:  # by the same task, twice
            raise BrokenExecutor from error
        except (CancelledError, CommClosedError) as error:
            raise UserError(
                f"The Dask scheduler at --cluster {address} is gone: start it again, and repeat "
                f"the command, which goes on from the tasks that are done"
            ) from error


async def _contact(address: str) -> None:
    """Connect to a scheduler; `Client` alone waits for ever if a port accepts and never answers."""
    from distributed.comm import connect
    from distributed.security import Security

    settings = Security().get_connection_args("client")
    connecting = connect(address, timeout=SCHEDULER_SECONDS, **settings)
    comm = await asyncio.wait_for(connecting, SCHEDULER_SECONDS)
    await comm.close()
