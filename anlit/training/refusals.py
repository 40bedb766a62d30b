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
from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment
from torch.distributed import TCPStore

REFUSED, SEEN, DONE = "anlit/refused", "anlit/seen", "anlit/done"
CONNECTING, LONGEST_WAIT = timedelta(minutes=10), timedelta(seconds=30)
POLL_S, GRACE_S = 0.3, 2.0


class Refusals(L.Callback):
    """What the ranks of one command tell each other until training starts; nothing for a single rank."""

    def __init__(self) -> None:
        self._environment: ClusterEnvironment | None = None
        self._stopped = threading.Event()

    def listen(self) -> None:
        """End this process from now on, with the same exit code, when another rank refuses."""
        launchers = (TorchElasticEnvironment, SLURMEnvironment)
        environment = next((launcher() for launcher in launchers if launcher.detect()), None)
        if environment is not None and environment.world_size() > 1:
            self._environment = environment
            self._stopped.clear()
            threading.Thread(target=self._end_with_others, args=(environment,), daemon=True).start()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()

    def _stop(self) -> None:
        self._stopped.set()
        self._environment = None

    def tell(self, exit_code: int) -> None:
        """Tell the other ranks that this one refuses; returns when they have seen it, or after half a minute."""
        if (environment := self._environment) is None:
            return
        with suppress(RuntimeError):  # the store is gone, and rank 0 with it
            store = _connect(environment, LONGEST_WAIT)
            self._stop()
            store.set(REFUSED, str(exit_code))
            until, seen = time.monotonic() + LONGEST_WAIT.total_seconds(), store.add(SEEN, 1)
            while seen < environment.world_size() and time.monotonic() < until:
                time.sleep(POLL_S)
                seen = store.add(SEEN, 0)
            store.set(DONE, "")

    def _end_with_others(self, environment: ClusterEnvironment) -> None:
        with suppress(RuntimeError):
            store = _connect(environment, CONNECTING)
            while not self._stopped.wait(POLL_S):
                if store.check([REFUSED]) and not self._stopped.wait(GRACE_S):  # else this rank refuses by itself
                    exit_code = int(store.get(REFUSED))
                    store.add(SEEN, 1)
                    if _serves(environment):  # the store ends with this process
                        store.wait([DONE], LONGEST_WAIT)
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(exit_code)  # the main thread may wait for the other rank


def _serves(environment: ClusterEnvironment) -> bool:
    """Whether the store is in this process; else in that of rank 0 or of torchrun."""
    return environment.global_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _connect(environment: ClusterEnvironment, timeout: timedelta) -> TCPStore:
    """The store that `init_process_group` will use too."""
    return TCPStore(
        environment.main_address, environment.main_port, environment.world_size(), _serves(environment), timeout,
        wait_for_workers=False, multi_tenant=True,
    )  # fmt: skip


refusals = Refusals()
