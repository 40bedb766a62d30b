"""Where tasks run: in this process, in worker processes of this machine, or on the workers of a Dask cluster."""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import sys
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
from contextlib import contextmanager, nullcontext

from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from anlit.data.preparation.encode import Job, Task, encode_task
from anlit.data.storage.manifest import TASKS
from anlit.errors import UserError, install
from anlit.reporting.table import console
from anlit.reporting.text import say
from anlit.signals import leave_signals_to_parent, signals_held

LINE_EVERY_SECONDS = 30
CONTACT_SECONDS = 10
PR_SET_PDEATHSIG = (
    1  # Linux sends a process this signal when the one that has started it ends (prctl(2))
)


def run_tasks(job: Job, is_done: Mapping[Task, bool], workers: int, cluster: str | None) -> None:
    """Encode the tasks that are not done, in any order: on a Dask cluster, in worker processes, or in this one.

    Errors are those of `encode_task`, UserError if there is no such cluster, and BrokenExecutor if a worker is killed.
    """
    tasks = [task for task, done in is_done.items() if not done]
    parts_left = Counter(piece.file for task in tasks for piece in task.pieces)
    n_files, n_tokens, begun = (
        len({piece.file for task in is_done for piece in task.pieces}),
        0,
        time.monotonic(),
    )
    size, last_line = sum(task.size for task in is_done), begun
    alone = nullcontext() if min(workers, len(tasks)) < 2 else _processes(min(workers, len(tasks)))
    columns = (
        BarColumn(),
        DownloadColumn(),
        "{task.description}",
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    shown = Progress(*columns, console=console(stderr=True), disable=not sys.stderr.isatty())
    with alone if cluster is None else _cluster(cluster) as executor, shown as progress:
        bar = progress.add_task("", total=size, completed=size - sum(task.size for task in tasks))
        for task, its_tokens in _results(executor, job, tasks):
            for piece in task.pieces:
                parts_left[piece.file] -= 1
                if parts_left[piece.file] == 0:
                    del parts_left[piece.file]
                    job.recipe.source.release(piece.file, job.folder / TASKS)
            n_tokens, now = n_tokens + its_tokens, time.monotonic()
            files, rate = (
                f"{n_files - len(parts_left):,} of {n_files:,} files",
                n_tokens / (now - begun),
            )
            said = f"{files}, {n_tokens:,} tokens, {rate:,.0f} tokens/s"
            progress.update(bar, advance=task.size, description=said)
            if progress.disable and now - last_line > LINE_EVERY_SECONDS:
                last_line, state = now, progress.tasks[bar]
                say(
                    f"{state.percentage:.1f}%, {said}, {(state.time_remaining or 0) / 60:,.0f} min left"
                )


def _results(
    executor: Executor | None, job: Job, tasks: Sequence[Task]
) -> Iterator[tuple[Task, int]]:
    """Each task when it is done, with its tokens."""
    if executor is None:
        yield from ((task, encode_task(job, task)) for task in tasks)
        return
    with signals_held():
        futures = {executor.submit(_encode_alone, job, task): task for task in tasks}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        for future in futures:
            future.cancel()


def _encode_alone(job: Job, task: Task) -> int:
    """`encode_task` on one core, beside others."""
    # The tokenizers library would start as many threads as there are cores, and it hangs in a forked process whose
    # parent has used its threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return encode_task(job, task)


@contextmanager
def _processes(workers: int) -> Iterator[Executor]:
    """Worker processes. After an error they finish what they have begun; at a signal this process ends them."""
    # Forked, they start in 0.1 s, spawned in seconds; they touch nothing but files and tokenizers.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(
        workers, context, initializer=_begin_worker, initargs=(os.getpid(),)
    ) as pool:
        try:
            yield pool
        except KeyboardInterrupt:
            # Not terminate(): the system drops its SIGTERM where one to the whole group still waits.
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _begin_worker(parent: int) -> None:
    leave_signals_to_parent()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before that call, and no signal will come
        os._exit(1)


@contextmanager
def _cluster(address: str) -> Iterator[Executor]:
    """The workers of a Dask scheduler, which runs a task once more where one of them is lost."""
    try:
        from distributed import Client, KilledWorker
        from distributed.comm import CommClosedError

        asyncio.run(_contact(address))
        client = Client(address, timeout=CONTACT_SECONDS)
    except ImportError as error:
        raise UserError(f"--cluster needs Dask: {install('cluster', 'distributed')}.") from error
    except TypeError as error:  # without certificates Dask has no context for TLS
        raise UserError(
            f"--cluster {address} needs certificates: name them in Dask's configuration "
            "(distributed.comm.tls), or give a tcp:// address."
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"No Dask scheduler answers at --cluster {address}: start one with `dask scheduler`, or give the address "
            "that it prints, such as tcp://127.0.0.1:8786."
        ) from error
    with client:
        try:
            yield client.get_executor(pure=False, retries=1)
        except KilledWorker as error:  # in one task, again and again
            raise BrokenExecutor from error
        except (CancelledError, CommClosedError) as error:
            raise UserError(
                f"The Dask scheduler at --cluster {address} is gone: start it again, and repeat "
                "the command, which goes on from what is done."
            ) from error


async def _contact(address: str) -> None:
    """Connect to a scheduler once; `Client` waits for ever at a port that accepts and says nothing."""
    from distributed.comm import connect
    from distributed.security import Security

    settings = Security().get_connection_args("client")
    connecting = connect(address, timeout=CONTACT_SECONDS, **settings)
    comm = await asyncio.wait_for(connecting, CONTACT_SECONDS)
    await comm.close()
