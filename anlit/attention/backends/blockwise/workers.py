"""Threads of one core each, for work that falls into independent shares of many small operations.

The usual way, all cores on each operation, makes every one wait for the slowest core, and where another program runs on
one of them that is each time as long as the scheduler likes. Here they wait for each other once.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch

T = TypeVar("T")

_pools: dict[int, ThreadPoolExecutor] = {}
os.register_at_fork(after_in_child=_pools.clear)  # a forked process has no threads but one


def run(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """The tasks' results, each without gradients and on a core of its own; a single one has all cores."""
    if len(tasks) == 1:
        return [tasks[0]()]
    pool = _pools.get(len(tasks)) or _start(len(tasks))
    inference = torch.is_inference_mode_enabled()  # like the mode for gradients it is each thread's own
    return list(pool.map(lambda task: _with_modes(task, inference), tasks))


def _with_modes(task: Callable[[], T], inference: bool) -> T:
    with torch.inference_mode(inference), torch.no_grad():
        return task()


def _start(n: int) -> ThreadPoolExecutor:
    """A pool of n threads that run, each with one core; `torch.set_num_threads` is a thread's own but for what new
    threads begin with, which is put back."""
    threads, all_run = torch.get_num_threads(), Barrier(n)
    pool = ThreadPoolExecutor(n, "anlit-attention", initializer=lambda: torch.set_num_threads(1))
    list(pool.map(lambda _: all_run.wait(), range(n)))
    torch.set_num_threads(threads)
    _pools[n] = pool
    return pool
