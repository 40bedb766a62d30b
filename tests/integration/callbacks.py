"""Callbacks that make something go wrong at a known batch, where a test must not depend on timing."""

import os
import resource
import signal
from typing import Any

import lightning as L

from anlit.errors import UserError


class AtBatch(L.Callback):
    """Does something when training batch number `batch` (from 0) begins.

    Args:
        batch: Number of the batch.
        rank: The only rank that it happens to; by default all.
    """

    def __init__(self, batch: int, rank: int | None = None) -> None:
        self.batch, self.rank = batch, rank

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch and self.rank in (None, trainer.global_rank):
            self.act()

    def act(self) -> None:
        raise NotImplementedError


class SignalAt(AtBatch):
    """Sends the signal `name` to this process."""

    def __init__(self, batch: int, name: str = "SIGINT", rank: int | None = None) -> None:
        super().__init__(batch, rank)
        self.number = signal.Signals[name]

    def act(self) -> None:
        os.kill(os.getpid(), self.number)


class FullDisk(AtBatch):
    """Files of this process cannot grow beyond `limit` bytes from then on, as on a full disk.

    A tiny run's part of a checkpoint exceeds the limit; its record and metrics do not.
    """

    def __init__(self, batch: int, limit: int = 40_000, rank: int | None = None) -> None:
        super().__init__(batch, rank)
        self.limit = limit

    def act(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.RLIM_INFINITY))


class Refuses(L.Callback):
    """A mistake that one rank alone notices.

    Args:
        rank: That rank.
        made: Whether it notices before the ranks are connected, or in `setup`.
    """

    def __init__(self, rank: int, made: bool) -> None:
        self.rank = rank
        if made and os.environ["RANK"] == str(rank):
            raise UserError("this rank alone refuses")

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if trainer.global_rank == self.rank:
            raise UserError("this rank alone refuses")
