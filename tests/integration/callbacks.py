"""Callbacks that cause a fault at a fixed moment, so that tests do not depend on timing."""

import itertools
import json
import os
import pkgutil
import resource
import signal
import subprocess
import time
from collections import Counter
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import LambdaCallback, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed

from anlit.errors import UserError

COLLECTIVES = (
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather_object",
    "monitored_barrier",
    "reduce",
)
"""Functions of torch.distributed by which ranks talk."""


class NeedsPackage(L.Callback):
    """Raises in its constructor, as Lightning's MLFlowLogger does without its package."""

    def __init__(self) -> None:
        raise ModuleNotFoundError("the package nowhere is not installed")


class NotesConstruction(L.Callback):
    """Adds a line to the file `path` in its constructor, as a user's callback may open a record."""

    def __init__(self, path: str, line: str = "made") -> None:
        with open(path, "a") as file:
            file.write(line + "\n")


class AtBatch(L.Callback):
    """Sends the signal `event` when training batch `batch` (from 0) begins, on a rank or on all.

    The event `full disk` limits the files of this process to 40 kB. A rank's checkpoint of a tiny
    run exceeds the limit; its record and metrics do not.
    """

    def __init__(self, event: str, batch: int, rank: int | None = None) -> None:
        self.event = event
        self.batch = batch
        self.rank = rank

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


class InterruptedAtItsEnd(CSVLogger):
    """Sends Ctrl-C when the run, which has stopped, ends its loggers."""

    def finalize(self, status: str) -> None:
        if status != "success":
            os.kill(os.getpid(), signal.SIGINT)
        super().finalize(status)


class KilledIn(L.Callback):
    """Kills this process at its `call`-th call of `name` in `owner`, a module or class."""

    def __init__(self, owner: str, name: str, call: int) -> None:
        owner_object = pkgutil.resolve_name(owner)
        original = getattr(owner_object, name)
        call_numbers = itertools.count(1)

        def killing(*arguments: Any, **settings: Any) -> Any:
            if next(call_numbers) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **settings)

        setattr(owner_object, name, killing)


class Refuses(L.Callback):
    """A mistake that a rank alone notices, in the constructor (unconnected) or in `setup`."""

    def __init__(self, rank: int, in_constructor: bool) -> None:
        self.rank = rank
        if in_constructor and os.environ["RANK"] == str(rank):
            raise UserError("this rank alone refuses")

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if trainer.global_rank == self.rank:
            raise UserError("this rank alone refuses")


class RefusesOnEachRank(L.Callback):
    """A mistake that each rank notices with a sentence of its own."""

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        raise UserError(f"rank {trainer.global_rank} refuses")


class EndsLate(L.Callback):
    """Lets a rank end seconds after it has decided to end at once, as on a busy machine."""

    def __init__(self, rank: int) -> None:
        if os.environ["RANK"] == str(rank):
            end = os._exit

            def end_late(code: int) -> None:
                time.sleep(3)
                end(code)

            os._exit = end_late  # type: ignore[assignment]


class Numbers(L.Callback):
    """Prints the number of each micro-batch in the epoch when it begins."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        print("micro-batch", trainer.global_step, batch_idx)


class Signalled(L.Callback):
    """Sends the signal `name` to this process or its group when a batch of `stage` begins.

    `stage` is train or validate. The sender is another process, as with scancel, `timeout` or a
    terminal. The group is this process and its children.
    """

    def __init__(
        self, name: str, stage: str, batch: int, group: bool = False, rank: int | None = None
    ) -> None:
        self.name = name
        self.stage = stage
        self.batch = batch
        self.group = group
        self.rank = rank
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


class SignalledWhenMade(L.Callback):
    """Sends the signal `name` to a rank before the ranks are connected."""

    def __init__(self, rank: int, name: str) -> None:
        if os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), signal.Signals[name])


class OwnThroughput(ThroughputMonitor):
    """ThroughputMonitor with its function, which a configuration cannot name."""

    def __init__(self) -> None:
        super().__init__(batch_size_fn=lambda batch: len(batch.tokens), window_size=3)


class OwnLambda(LambdaCallback):
    """LambdaCallback that prints at each validation; a configuration cannot name functions."""

    def __init__(self) -> None:
        super().__init__(on_validation_end=lambda trainer, _: print("validated"))


class PathFinderLogger(L.Callback):
    """Counts batches in its state. Its name contains the name of a refused callback."""

    def __init__(self) -> None:
        self.n_batches = 0

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.n_batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"n_batches": self.n_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.n_batches = state_dict["n_batches"]


class OwnDDP(DDPStrategy):
    """A user's strategy, derived from a strategy that runs can have."""


class CountCollectives(L.Callback):
    """Writes to `path`.RANK what this rank has told others since the last micro-batch began.

    A line is JSON, for each micro-batch: the number of calls, by `host` or `devices` and the
    function. The calls on devices are those of the group of all ranks, which is NCCL's on GPUs.
    DDP's exchange of gradients is not Python's and does not count.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.calls: Counter[str] = Counter()
        for name in COLLECTIVES:
            counting = partial(self.count, name, getattr(distributed, name))
            setattr(distributed, name, counting)
            setattr(distributed.distributed_c10d, name, counting)

    def count(self, name: str, call: Any, *arguments: Any, **settings: Any) -> Any:
        group = settings.get("group")
        for argument in arguments:
            if isinstance(argument, distributed.ProcessGroup):
                group = argument
        is_of_all_ranks = group is None or group is distributed.group.WORLD
        self.calls[f"{'devices' if is_of_all_ranks else 'host'} {name}"] += 1
        return call(*arguments, **settings)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        with open(f"{self.path}.{trainer.global_rank}", "a") as file:
            file.write(json.dumps(self.calls) + "\n")
        self.calls.clear()
