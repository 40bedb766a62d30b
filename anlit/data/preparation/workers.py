"""The processes that read and encode, and how each of them begins."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import Any


def worker_pool(workers: int) -> Executor:
    """`workers` processes that have begun already; below two, this process itself."""
    if workers < 2:
        return _InThisProcess()
    # Forked workers start in 0.1 s, spawned ones in seconds; they touch nothing but files and tokenizers.
    method = "fork" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(method)
    pool = ProcessPoolExecutor(workers, context, initializer=_begin_worker, initargs=(os.getpid(),))
    pool.submit(os.getpid).result()  # all are forked now, before this process has threads
    return pool


class _InThisProcess(Executor):
    """For work too small to start processes for."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _begin_worker(parent: int) -> None:
    """Let a worker ignore Ctrl-C, which its parent handles, and end when its parent is gone."""
    # One thread in each worker. The tokenizers library hangs in a forked process whose parent has used its threads, and
    # by default every worker would start as many threads as there are cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a training process that prepares its data has its own handler

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def in_thread(work: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run `work` in a thread that does not keep the process alive, so that Ctrl-C need not wait for a download."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args))
        except BaseException as error:  # to be raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
