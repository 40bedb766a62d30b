"""Threads of a CPU: how many there are, and how they wait for each other."""

import os

from anlit.io.cores import cores, usable_cores

SPINS = "10000"
"""Rounds that a thread waits awake for the other threads, before it sleeps.

GNU's OpenMP, which torch has, takes 300,000. Beside other work these cost more than the training:
the thread that is waited for does not get the core.
"""


THREADS = "OMP_NUM_THREADS"
"""The variable that OpenMP reads."""
_chosen_here: list[int] = []
"""The number of threads that this process has chosen, and not yet divided among ranks."""


def set_thread_defaults() -> None:
    """Set variables that OpenMP reads when torch is imported, unless the user has set them.

    torch makes a thread for each core that it sees. If a container has a share of their time, the
    system stops all threads for most of each period.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    n_cores = cores()
    if n_cores < usable_cores() and THREADS not in os.environ:
        os.environ[THREADS] = str(n_cores)
        _chosen_here.append(n_cores)


def divide_threads(n_ranks: int) -> None:
    """Give each rank on this machine its part of the threads that `set_thread_defaults` chose.

    Lightning divides only a number that it chooses itself. Processes that this one starts inherit
    the number.
    """
    if not _chosen_here:
        return
    import torch

    n_threads = max(1, _chosen_here.pop() // n_ranks)
    os.environ[THREADS] = str(n_threads)
    torch.set_num_threads(n_threads)
