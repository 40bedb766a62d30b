"""Until training starts, a rank that refuses ends the others, which would wait for it until their time-out.

Where Lightning starts the ranks, it ends them too. Ranks that torchrun or Slurm start have the store that they meet in:
a refusing rank leaves its exit code there. From the first step on ranks notice by themselves that one is gone, because
each step has a small all-reduce on the host (`Interruption`).
"""

import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

import lightning as L
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from torch.distributed import TCPStore

REFUSED, SEEN, DONE = "anlit/refused", "anlit/seen", "anlit/done"
CONNECTING, LONGEST_WAIT = timedelta(minutes=10), timedelta(seconds=30)
POLL_S, GRACE_S = 0.3, 2.0


class Refusals(L.Callback):
    """What the ranks of one command tell each other until training starts; nothing for a single rank."""

    def __init__(self) -> None:
        self._environment: ClusterEnvironment | None = None
        self._stopped = threading.Event()
        self._stopped.set()

    def listen(self) -> None:
        """End this process from now on, with the same exit code, when another rank refuses."""
        launchers = (TorchElasticEnvironment, SLURMEnvironment)
        self._environment = next((launcher() for launcher in launchers if launcher.detect()), None)
        if self._environment is not None and self._environment.world_size() > 1:
            self._stopped.clear()
            threading.Thread(
                target=self._end_with_others, args=(self._environment,), daemon=True
            ).start()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stopped.set()

    def tell(self, exit_code: int) -> None:
        """Tell the other ranks that this one refuses; returns when they have seen it, or after half a minute."""
        if (environment := self._environment) is None or self._stopped.is_set():
            return
        with suppress(RuntimeError):  # the store is gone, and rank 0 with it
            store = _connect(environment, LONGEST_WAIT)
            self._stopped.set()
            store.set(REFUSED, str(exit_code))
            until = time.monotonic() + LONGEST_WAIT.total_seconds()
            store.add(SEEN, 1)
            while store.add(SEEN, 0) < environment.world_size() and time.monotonic() < until:
                time.sleep(POLL_S)
            store.set(DONE, "")

    def _end_with_others(self, environment: ClusterEnvironment) -> None:
        with suppress(RuntimeError):
            store = _connect(environment, CONNECTING)
            while not self._stopped.wait(POLL_S):
                if store.check([REFUSED]) and not self._stopped.wait(
                    GRACE_S
                ):  # else this rank refuses by itself
                    exit_code = int(store.get(REFUSED))
                    store.add(SEEN, 1)
                    if _serves(environment):  # the store ends with this process
                        store.wait([DONE], LONGEST_WAIT)
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(exit_code)  # the main thread may wait for the other rank


def _serves(environment: ClusterEnvironment) -> bool:
    """Whether the store is in this process; else in that of rank 0 or of torchrun."""
    return (
        environment.global_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    )


def _connect(environment: ClusterEnvironment, timeout: timedelta) -> TCPStore:
    """The store that `init_process_group` will use too."""
    address, port, n_ranks = (
        environment.main_address,
        environment.main_port,
        environment.world_size(),
    )
    return TCPStore(
        address,
        port,
        n_ranks,
        _serves(environment),
        timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


refusals = Refusals()
