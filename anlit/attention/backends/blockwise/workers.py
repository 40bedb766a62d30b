"""Threads of one core each, for work that divides into independent shares of many small operations.

Usually all cores share each operation, and each operation waits for the slowest core. If another program runs on one
core, that can be long. Here the threads wait for each other once, at the end.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch

T = TypeVar("T")

_pools: dict[int, ThreadPoolExecutor] = {}
os.register_at_fork(after_in_child=_pools.clear)  # a forked process has one thread only


def run(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """The results of the tasks, which run without gradients, one core each. A single task has all cores."""
    if len(tasks) == 1:
        return [tasks[0]()]
    pool = _pools.get(len(tasks)) or _start(len(tasks))
    inference = torch.is_inference_mode_enabled()  # inference mode, like gradient mode, is set per thread
    return list(pool.map(lambda task: _with_modes(task, inference), tasks))


def _with_modes(task: Callable[[], T], inference: bool) -> T:
    with torch.inference_mode(inference), torch.no_grad():
        return task()


def _start(n: int) -> ThreadPoolExecutor:
    """A pool of n running threads with one core each. `torch.set_num_threads` is set per thread, but it also changes
    the default for new threads, which is restored here."""
    threads, all_started = torch.get_num_threads(), Barrier(n)
    pool = ThreadPoolExecutor(n, "anlit-attention", initializer=lambda: torch.set_num_threads(1))
    list(pool.map(lambda _: all_started.wait(), range(n)))
    torch.set_num_threads(threads)
    _pools[n] = pool
    return pool
