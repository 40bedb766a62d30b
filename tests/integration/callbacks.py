"""Callbacks that make something go wrong at a known moment, where a test must not depend on timing."""

import itertools
import os
import pkgutil
import resource
import signal
import subprocess
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import LambdaCallback, ThroughputMonitor
from lightning.pytorch.strategies import DDPStrategy

from anlit.errors import UserError


class AtBatch(L.Callback):
    """Sends the signal `event` to this process when training batch number `batch` (from 0) begins, on one rank or all.

    `full disk`: the files of this process cannot grow beyond 40 kB from then on. A tiny run's part of a checkpoint
    exceeds that; its record and metrics do not.
    """

    def __init__(self, event: str, batch: int, rank: int | None = None) -> None:
        self.event, self.batch, self.rank = event, batch, rank

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx != self.batch or self.rank not in (None, trainer.global_rank):
            return
        if self.event == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
        else:
            os.kill(os.getpid(), signal.Signals[self.event])

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.state.fn == "validate":
            self.on_train_batch_start(trainer, pl_module, batch, batch_idx)


class KilledIn(L.Callback):
    """SIGKILL when this process calls `name` of a module or class, `owner`, for the `call`-th time."""

    def __init__(self, owner: str, name: str, call: int) -> None:
        held = pkgutil.resolve_name(owner)
        original, number = getattr(held, name), itertools.count(1)

        def deadly(*arguments: Any, **settings: Any) -> Any:
            if next(number) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **settings)

        setattr(held, name, deadly)


class Refuses(L.Callback):
    """A mistake that one rank alone notices, before the ranks are connected (`made`) or in `setup`."""

    def __init__(self, rank: int, made: bool) -> None:
        self.rank = rank
        if made and os.environ["RANK"] == str(rank):
            raise UserError("this rank alone refuses")

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if trainer.global_rank == self.rank:
            raise UserError("this rank alone refuses")


class Numbers(L.Callback):
    """Prints the number of the micro-batch in the epoch at its begin."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        print("micro-batch", trainer.global_step, batch_idx)


class Signalled(L.Callback):
    """Sends the signal `name` when a batch of `stage`, train or validate, begins: to this process or to its group.

    The sender is another process, as with scancel, `timeout` or a terminal. The group is this process and its children.
    """

    def __init__(
        self, name: str, stage: str, batch: int, group: bool = False, rank: int | None = None
    ) -> None:
        self.name, self.stage, self.batch, self.group, self.rank = name, stage, batch, group, rank
        if group:
            os.setpgid(0, 0)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._send(trainer, "train", batch_idx)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._send(trainer, "validate", batch_idx)

    def _send(self, trainer: L.Trainer, stage: str, batch_idx: int) -> None:
        if (stage, batch_idx) != (self.stage, self.batch) or trainer.sanity_checking:
            return
        if self.rank not in (None, trainer.global_rank):
            return
        target = -os.getpgrp() if self.group else os.getpid()
        name = self.name.removeprefix("SIG")
        subprocess.run(["/bin/kill", "-s", name, "--", str(target)], check=False)


class PreemptedWhenMade(L.Callback):
    """SIGTERM to one rank before the ranks are connected."""

    def __init__(self, rank: int) -> None:
        if os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), signal.SIGTERM)


class OwnThroughput(ThroughputMonitor):
    """Lightning's needs a function, which a configuration cannot name."""

    def __init__(self) -> None:
        super().__init__(batch_size_fn=lambda batch: len(batch.tokens), window_size=3)


class OwnLambda(LambdaCallback):
    """Prints at each validation; a configuration cannot name the function."""

    def __init__(self) -> None:
        super().__init__(on_validation_end=lambda trainer, _: print("validated"))


class PathFinderLogger(L.Callback):
    """Counts batches in a state of its own; its name has a piece of a callback's that is refused."""

    def __init__(self) -> None:
        self.n_batches = 0

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.n_batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"n_batches": self.n_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.n_batches = state_dict["n_batches"]


class OwnDDP(DDPStrategy):
    """A user's own strategy, derived from one that runs can have."""
