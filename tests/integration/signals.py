"""A callback that signals its own process at a known batch, where a test must not depend on timing."""

import os
import signal
from typing import Any

import lightning as L


class SignalAt(L.Callback):
    """Sends SIGINT to this process when training batch number `batch` (from 0) begins.

    Args:
        batch: Number of the batch.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            os.kill(os.getpid(), signal.SIGINT)
