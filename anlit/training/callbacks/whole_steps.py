"""Validation, checkpoints and the end of a run only between optimizer steps; Lightning counts micro-batches."""

import math
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from anlit.errors import UserError
from anlit.lightning_internals import (
    completes_step,
    number_logged_steps,
    restore_validation_rule,
    set_validation_rule,
    stops_now,
    validates_by_time,
    validates_in_this_epoch,
)


class WholeSteps(Checkpoint):
    """Counts `val_check_interval` in optimizer steps, and lets nothing come between the micro-batches of a step.

    A checkpoint has no gradients, so one that is written within a step would lose those of the step's micro-batches. An
    integer `val_check_interval` is a number of optimizer steps: of the run, or of each epoch if
    `check_val_every_n_epoch` is set. A float is a share of an epoch's steps. A time is checked after each step. The
    run's last step is always validated. A request to stop within a step (`max_time`) takes effect after the step. The
    `step` in the logs is the number of the optimizer step, from 0.

    Lightning calls checkpoint callbacks after all others. This callback is one, so that it sees the others' requests.
    """

    def __init__(self) -> None:
        self._stop_after_step = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        _align_progress(trainer)
        every = _steps_between_validations(trainer)

        def is_due(lightnings_rule: Callable[[], bool]) -> bool:
            if not completes_step(trainer):
                return False
            if _ends(trainer):
                return trainer.enable_validation
            if every is None or stops_now(trainer):
                return lightnings_rule()
            steps = trainer.global_step
            if trainer.check_val_every_n_epoch is not None:
                batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
                steps = math.ceil(batches / trainer.accumulate_grad_batches)
            return validates_in_this_epoch(trainer) and steps % every == 0

        set_validation_rule(trainer, is_due)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # The number of this step in the logs. Lightning's own count is off by one if a run is continued after its end
        # or with another interval.
        number_logged_steps(trainer, trainer.global_step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        asked = trainer.should_stop or self._stop_after_step
        within = not completes_step(trainer)
        trainer.should_stop, self._stop_after_step = asked and not within, asked and within

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        restore_validation_rule(trainer)


def _ends(trainer: L.Trainer) -> bool:
    """Whether the optimizer step that was just taken is the run's last by `max_steps` or `max_epochs`."""
    if trainer.global_step == trainer.max_steps:
        return True
    is_last_batch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    return is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs


def _steps_between_validations(trainer: L.Trainer) -> int | None:
    """Optimizer steps from one validation to the next; None to use Lightning's rule, for example by time."""
    if validates_by_time(trainer):
        return None
    interval, steps = trainer.val_check_interval, _steps_per_epoch(trainer)
    if isinstance(interval, float):
        return None if steps == math.inf else max(1, int(steps * interval))
    if trainer.check_val_every_n_epoch is not None and interval > steps and trainer.enable_validation:
        raise UserError(
            f"trainer.val_check_interval={interval} is more than the {steps} optimizer steps of an epoch: choose a "
            "smaller one, or set trainer.check_val_every_n_epoch to null to count across epochs"
        )
    return interval


def _steps_per_epoch(trainer: L.Trainer) -> float:
    """Optimizer steps of an epoch; its last micro-batches are a step, even if they are few."""
    batches = trainer.num_training_batches
    return batches if batches == math.inf else math.ceil(batches / trainer.accumulate_grad_batches)


def _align_progress(trainer: L.Trainer) -> None:
    """Recompute a continued run's number of micro-batches for the present accumulation and batches.

    Lightning steps when the number of micro-batches in the epoch is a multiple of `accumulate_grad_batches`. The
    checkpoint has the number of the earlier run. After a change the first step would come early, with less data.
    """
    loop = trainer.fit_loop.epoch_loop
    progress: Any = loop.batch_progress.current
    steps = loop.automatic_optimization.optim_progress.optimizer.step.current.completed
    expected = steps * trainer.accumulate_grad_batches
    per_epoch = _steps_per_epoch(trainer)
    if steps and per_epoch != math.inf:
        steps = (steps - 1) % int(per_epoch) + 1
        expected = min(steps * trainer.accumulate_grad_batches, int(trainer.num_training_batches))
    shift = expected - progress.ready
    progress.ready, progress.started = progress.ready + shift, progress.started + shift
    progress.processed, progress.completed = progress.processed + shift, progress.completed + shift
