"""A callback that signals its own process at a known batch, where a test must not depend on timing."""

import os
import signal
from typing import Any

import lightning as L


class SignalAt(L.Callback):
    """Sends a signal to this process when training batch number `batch` (from 0) begins.

    Args:
        batch: Number of the batch.
        name: Of the signal.
        rank: The only rank that does so; by default all do.
    """

    def __init__(self, batch: int, name: str = "SIGINT", rank: int | None = None) -> None:
        self.batch, self.number, self.rank = batch, signal.Signals[name], rank

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch and self.rank in (None, trainer.global_rank):
            os.kill(os.getpid(), self.number)
