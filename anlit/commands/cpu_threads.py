"""Threads of a CPU: how many there are, and how they wait for each other. Without torch."""

import os

from anlit.io.cores import cores, usable_cores

SPINS = "10000"
"""Rounds that a thread waits awake for the other threads, before it sleeps.

GNU's OpenMP, which torch has, takes 300,000. Beside other work these cost more than the training:
the thread that is waited for does not get the core.
"""


def set_thread_defaults() -> None:
    """Set variables that OpenMP reads when torch is imported, unless the user has set them.

    torch makes a thread for each core that it sees. If a container has a share of their time, the
    system stops all threads for most of each period.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    n_cores = cores()
    if n_cores < usable_cores():
        os.environ.setdefault("OMP_NUM_THREADS", str(n_cores))
