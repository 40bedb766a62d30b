"""Batches that spoil a step, for runs in this process and from the command line."""

from typing import Any

import lightning as L
from torch import Tensor


class Poison(L.Callback):
    """Multiplies the loss of some batches, NaN by default; on one rank only, if one is named."""

    def __init__(self, batches: list[int], factor: float = float("nan"), rank: int | None = None) -> None:
        self.batches, self.factor, self.rank = set(batches), factor, rank

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        step: Any = pl_module.training_step

        def training_step(batch: Any, batch_idx: int) -> Tensor:
            here = batch_idx in self.batches and self.rank in (None, trainer.global_rank)
            return step(batch, batch_idx) * (self.factor if here else 1.0)

        pl_module.training_step = training_step
