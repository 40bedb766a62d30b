"""Until training starts, a rank that refuses also ends the ranks that would wait for it.

If Lightning starts the ranks, it ends them too. Ranks of torchrun or Slurm have a store in which
they meet. A refusing rank leaves its exit code there. From the first step on, ranks notice a lost
rank by themselves. Each step has a small all-reduce on the host (`Interruption`).

A mistake that several ranks find is printed by one of them. The store has the number of that rank.
"""

import atexit
import hashlib
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

import lightning as L
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from torch.distributed import TCPStore

from anlit.errors import UserError
from anlit.signals import ENDING_SIGNALS

REFUSED = "anlit/refused"
"""Key of the store: the exit code of the refusing rank."""
SEEN = "anlit/seen"
"""Key of the store: the number of ranks that know of the refusal."""
DONE = "anlit/done"
"""Key of the store: set when the refusing rank needs the store no longer."""
ASKED = "anlit/asked"
"""Key of the store: the number of failed ranks that know whether they print their error."""
CONNECT_TIMEOUT = timedelta(minutes=10)
"""The longest wait of a listening rank for the store."""
REFUSAL_TIMEOUT = timedelta(seconds=30)
"""The longest wait of a refusing rank for the store and for other ranks."""
POLL_S = 0.3
"""Seconds between two looks into the store."""
GRACE_S = 2.0
"""Seconds in which a rank may refuse with an error of its own, before it is ended.

Also the longest time for which failed ranks wait for rank 0 to print their error.
"""


class Refusals(L.Callback):
    """Tells all ranks of a command that a rank refuses, until training starts.

    It does nothing for a single rank.
    """

    def __init__(self) -> None:
        self._environment: ClusterEnvironment | None = None
        self._stopped = threading.Event()
        self._stopped.set()
        self._listener: threading.Thread | None = None
        self._has_heard = False
        """Whether another rank has refused, for which the listener will end this process."""

    def listen(self) -> None:
        """End this process from now on, with the same exit code, when another rank refuses."""
        self._environment = None
        for launcher in (TorchElasticEnvironment, SLURMEnvironment):
            if launcher.detect():
                self._environment = launcher()
                break
        if self._environment is not None and self._environment.world_size() > 1:
            self._stopped.clear()
            self._listener = threading.Thread(
                target=self._end_with_refusal, args=(self._environment,), daemon=True
            )
            self._listener.start()

    def join(self, trainer: L.Trainer) -> None:
        """Meet the ranks that Lightning starts; without a listener, because Lightning ends them."""
        if self._environment is None:
            self._environment = getattr(trainer.strategy, "cluster_environment", None)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stopped.set()

    def tell(self, exit_code: int, error: BaseException | None = None) -> bool:
        """Tell all ranks that this rank refuses; return whether this rank prints the error, if any.

        Until training starts, it returns when all ranks know, or after half a minute. From then on
        the launcher may end this process, because they have ended. It still says why it refuses. If
        another rank has refused, only a UserError is an error of this rank. Others come from the
        other rank's end, and this process ends here.
        """
        if self._has_heard and self._listener is not None and exit_code != UserError.exit_code:
            self._listener.join()
        environment = self._environment
        is_starting = not self._stopped.is_set()
        if environment is None or not _has_other_ranks(environment):
            return True
        if error is None and not is_starting:
            return True
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        is_printed = True
        with suppress(RuntimeError):  # the store is gone, and rank 0 with it
            timeout = REFUSAL_TIMEOUT if is_starting else timedelta(seconds=GRACE_S)
            store = _connect(environment, timeout)
            if error is not None and environment.global_rank() == 0:
                store.set(_printer_key(error), "0")
            if is_starting:
                self._stopped.set()
                _tell_exit_code(store, exit_code, environment.world_size())
            if error is not None:
                is_printed = _prints(store, error, environment)
        return is_printed

    def _end_with_refusal(self, environment: ClusterEnvironment) -> None:
        """Poll the store, and end this process when a rank has refused."""
        with suppress(RuntimeError):
            store = _connect(environment, CONNECT_TIMEOUT)
            while not self._stopped.wait(POLL_S):
                self._has_heard = store.check([REFUSED])
                # In the grace period this rank may refuse by itself.
                if self._has_heard and not self._stopped.wait(GRACE_S):
                    exit_code = int(store.get(REFUSED))
                    store.add(SEEN, 1)
                    if _has_store(environment):  # the store ends with this process
                        store.wait([DONE], REFUSAL_TIMEOUT)
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(exit_code)  # the main thread may wait for the refusing rank


def _has_other_ranks(environment: ClusterEnvironment) -> bool:
    """Whether there are other ranks already. Lightning sets LOCAL_RANK when it starts them."""
    is_started = not isinstance(environment, LightningEnvironment) or "LOCAL_RANK" in os.environ
    return is_started and environment.world_size() > 1


def _tell_exit_code(store: TCPStore, exit_code: int, n_ranks: int) -> None:
    """Leave the exit code in the store, and wait until all ranks know it."""
    store.set(REFUSED, str(exit_code))
    deadline = time.monotonic() + REFUSAL_TIMEOUT.total_seconds()
    store.add(SEEN, 1)
    while store.add(SEEN, 0) < n_ranks and time.monotonic() < deadline:
        time.sleep(POLL_S)
    store.set(DONE, "")


def _printer_key(error: BaseException) -> str:
    """Return the key of the store for the rank that prints this error."""
    text = f"{type(error).__name__}: {error}"
    return f"anlit/prints/{hashlib.sha256(text.encode(errors='replace')).hexdigest()}"


def _prints(store: TCPStore, error: BaseException, environment: ClusterEnvironment) -> bool:
    """Return whether this rank prints the error: rank 0 if it has it too, else the first to ask.

    The others end later. Launchers kill all ranks when the first of them has ended.
    """
    key = _printer_key(error)
    rank = str(environment.global_rank())
    deadline = time.monotonic() + GRACE_S
    while not store.check([key]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    is_printer = store.compare_set(key, "", rank) == rank.encode()
    store.add(ASKED, 1)
    if not is_printer:
        time.sleep(GRACE_S)
    elif _has_store(environment):
        atexit.register(_keep_store, store, environment.world_size())
    return is_printer


def _keep_store(store: TCPStore, n_ranks: int) -> None:
    """Keep the store of this process, which has printed its error, until all ranks have asked."""
    deadline = time.monotonic() + GRACE_S
    while store.add(ASKED, 0) < n_ranks and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _has_store(environment: ClusterEnvironment) -> bool:
    """Whether the store is in this process, and not in rank 0 or in torchrun."""
    is_in_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return environment.global_rank() == 0 and not is_in_torchrun


def _connect(environment: ClusterEnvironment, timeout: timedelta) -> TCPStore:
    """The store that `init_process_group` will use too."""
    return TCPStore(
        environment.main_address,
        environment.main_port,
        environment.world_size(),
        _has_store(environment),
        timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


refusals = Refusals()
"""The refusals of this process."""
