"""A callback after which files cannot grow, as on a full disk, without a disk to fill."""

import resource
from typing import Any

import lightning as L


class FullDisk(L.Callback):
    """From training batch number `batch` (from 0) on, this process can write no file beyond `limit` bytes.

    Args:
        batch: Number of the batch.
        limit: In bytes; what a tiny run's part of a checkpoint exceeds and its record and metrics do not.
        rank: The only rank that it happens to; by default all.
    """

    def __init__(self, batch: int, limit: int = 40_000, rank: int | None = None) -> None:
        self.batch, self.limit, self.rank = batch, limit, rank

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch and self.rank in (None, trainer.global_rank):
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.RLIM_INFINITY))
