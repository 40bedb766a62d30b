"""Until training starts, a rank that refuses ends the others, which would wait for it until their time-out.

Where Lightning starts the ranks, it ends them too. Ranks that torchrun or Slurm start have the store that they meet in:
a refusing rank leaves its exit code there. From the first step on ranks notice by themselves that one is gone, because
each step has a small all-reduce on the host (`Interruption`).
"""

import os
import sys
import threading
import time
from datetime import timedelta

import lightning as L
from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment
from torch.distributed import TCPStore

REFUSED, SEEN, DONE = "anlit/refused", "anlit/seen", "anlit/done"
CONNECTING = timedelta(minutes=10)
POLL_S, GRACE_S, LONGEST_WAIT_S = 0.3, 2.0, 30.0


class Refusals:
    """What the ranks of one command tell each other; nothing for a single rank."""

    def __init__(self) -> None:
        self._environment: ClusterEnvironment | None = None
        self._stopped = threading.Event()

    def listen(self) -> None:
        """End this process from now on, with the same exit code, when another rank refuses."""
        environment = next(
            (launcher() for launcher in (TorchElasticEnvironment, SLURMEnvironment) if launcher.detect()), None
        )
        if environment is not None and environment.world_size() > 1:
            self._environment = environment
            self._stopped.clear()
            threading.Thread(target=self._end_with_others, daemon=True).start()

    def stop(self) -> None:
        """Training has started."""
        self._stopped.set()
        self._environment = None

    def tell(self, exit_code: int) -> None:
        """Tell the other ranks that this one refuses; returns when they have seen it, or after half a minute."""
        if self._environment is None:
            return
        n_ranks = self._environment.world_size()
        try:
            store = self._connect(timedelta(seconds=LONGEST_WAIT_S))
            self.stop()
            store.set(REFUSED, str(exit_code))
            until, seen = time.monotonic() + LONGEST_WAIT_S, store.add(SEEN, 1)
            while seen < n_ranks and time.monotonic() < until:
                time.sleep(POLL_S)
                seen = store.add(SEEN, 0)
            store.set(DONE, "")
        except RuntimeError:  # the store is gone, and rank 0 with it
            return

    def _end_with_others(self) -> None:
        try:
            store = self._connect(CONNECTING)
            while not self._stopped.wait(POLL_S):
                if store.check([REFUSED]):
                    if self._stopped.wait(GRACE_S):  # this rank refuses by itself
                        return
                    exit_code = int(store.get(REFUSED))
                    store.add(SEEN, 1)
                    if self._serves:  # the store ends with this process
                        store.wait([DONE], timedelta(seconds=LONGEST_WAIT_S))
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(exit_code)  # the main thread may wait for the other rank
        except RuntimeError:
            return

    @property
    def _serves(self) -> bool:
        by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return self._environment is not None and self._environment.global_rank() == 0 and not by_torchrun

    def _connect(self, timeout: timedelta) -> TCPStore:
        """The store that `init_process_group` will use too, which rank 0 or torchrun serves."""
        assert self._environment is not None
        environment = self._environment
        return TCPStore(
            environment.main_address, environment.main_port, environment.world_size(), self._serves, timeout,
            wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip


refusals = Refusals()


class StopListening(L.Callback):
    """Ends the watch for refusals when training starts."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        refusals.stop()
