"""Lets the batch grow over a run."""

import logging
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only

from anlit.config.batch_ramp import Ramp, check_ramp
from anlit.training.lightning_internals import is_logged, skip_micro_batches

_log = logging.getLogger(__name__)


class BatchRamp(L.Callback):
    """Gives early optimizer steps fewer micro-batches: a ramp of gradient accumulation.

    The batch of a step is data.batch_size × micro-batches × devices. Micro-batches keep their size.
    So memory and the speed in tokens per second stay. `StepLoss` averages over the micro-batches of
    a step. The order of the data does not change.

    Shares of the learning-rate schedule are shares of the training tokens. Optimizer steps remain
    the unit of `max_steps`, `val_check_interval` and checkpoints. An epoch of the Trainer is a
    number of steps. The ramp is a function of the step. So a continued run needs no state.

    `train/batch_tokens` has the tokens of a step on all devices.

    Args:
        schedule: Optimizer step → micro-batches per step from that step on, as
            {0: 1, 1000: 2, 4000: 4}. The last number is the largest, and is
            trainer.accumulate_grad_batches.
    """

    changes_learning = True

    def __init__(self, schedule: dict[int, int]) -> None:
        self.ramp = Ramp(schedule)
        self._saved_schedule: Any = None
        """The schedule in the checkpoint that the run continues from."""

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": dict(self.ramp.schedule)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved_schedule = state_dict["schedule"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        check_ramp(self.ramp, trainer.accumulate_grad_batches)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._saved_schedule not in (None, self.ramp.schedule):
            rank_zero_only(_log.info)(
                "Continued with another BatchRamp, the new one is used: schedule "
                f"{self._saved_schedule} → {self.ramp.schedule}"
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a step late in Lightning's count, in which all steps have as many micro-batches."""
        is_first = batch_idx % trainer.accumulate_grad_batches == 0
        n_micro_batches = self.ramp.micro_batches(trainer.global_step)
        n_missing = trainer.accumulate_grad_batches - n_micro_batches
        if is_first and n_missing:
            skip_micro_batches(trainer, n_missing)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if is_logged(trainer, trainer.global_step):
            n_micro_batches = self.ramp.micro_batches(trainer.global_step - 1)
            tokens = batch.tokens.numel() * n_micro_batches * trainer.world_size
            # In float64; Lightning would turn a number into float32.
            pl_module.log("train/batch_tokens", torch.tensor(tokens, dtype=torch.float64))
