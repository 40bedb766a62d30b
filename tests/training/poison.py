"""Batches that spoil a step, for runs in this process and from the command line."""

import math
from typing import Any

import lightning as L
import torch
from torch import Tensor


class Poison(L.Callback):
    """Multiplies the loss of some batches by a factor. `rank`: None for all ranks."""

    def __init__(
        self, batches: list[int], factor: float = math.nan, rank: int | None = None
    ) -> None:
        self.batches = set(batches)
        self.factor = factor
        self.rank = rank

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        step: Any = pl_module.training_step
        is_on_rank = self.rank in (None, trainer.global_rank)

        def training_step(batch: Any, batch_idx: int) -> Tensor:
            loss = step(batch, batch_idx)
            if is_on_rank and batch_idx in self.batches:
                loss = loss * self.factor
            return loss

        pl_module.training_step = training_step


class PoisonGradient(L.Callback):
    """Sets an entry of a step's gradient, or of the weight after the step."""

    def __init__(self, step: int, value: float = math.nan, spoils_weight: bool = False) -> None:
        self.step = step
        self.value = value
        self.spoils_weight = spoils_weight

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not self.spoils_weight and trainer.global_step == self.step:
            pl_module.model.head.weight.grad[0, 0] = self.value

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if self.spoils_weight and trainer.global_step == self.step + 1:
            with torch.no_grad():
                pl_module.model.head.weight[0, 0] = self.value
