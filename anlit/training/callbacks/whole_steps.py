"""Validation, checkpoints and the end of a run only between optimizer steps; Lightning counts micro-batches."""

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
    validates_in_this_epoch,
)


class WholeSteps(Checkpoint):
    """Counts `val_check_interval` in optimizer steps, and lets nothing come between the micro-batches of a step.

    A checkpoint has no gradients, so one that is written within a step would lose those of the step's micro-batches. An
    integer `val_check_interval` is a number of optimizer steps: of the run, or of each epoch if
    `check_val_every_n_epoch` is set. A float is a share of an epoch. A time is checked after each step. The run's last
    step is always validated. A request to stop within a step (`max_time`) takes effect after the step. The `step` in
    the logs is the number of the optimizer step, from 0.

    Lightning calls checkpoint callbacks after all others. This callback is one, so that it sees the others' requests.
    """

    def __init__(self) -> None:
        self._stop_after_step = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check the interval, and count in steps.

        Raises:
            UserError: An epoch, or the share of it between validations, does not end with a step or is too short.
        """
        if trainer.num_training_batches != float("inf"):
            _check_epochs(trainer, int(trainer.num_training_batches), trainer.accumulate_grad_batches)
        _align_progress(trainer)
        set_validation_rule(trainer, lambda lightnings_rule: _validates(trainer, lightnings_rule))

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


def _check_epochs(trainer: L.Trainer, n_batches: int, accumulated: int) -> None:
    if n_batches % accumulated:
        raise UserError(
            f"trainer.accumulate_grad_batches={accumulated} does not divide the {n_batches} batches of an epoch: "
            "choose one that does, or set trainer.limit_train_batches"
        )
    interval, share = _interval(trainer), trainer.val_check_batch
    if isinstance(interval, float) and isinstance(share, int) and share % accumulated:
        raise UserError(
            f"trainer.val_check_interval={interval} is {share} of the {n_batches} batches of an epoch, which "
            f"trainer.accumulate_grad_batches={accumulated} does not divide: give a number of steps"
        )
    steps = n_batches // accumulated
    if trainer.check_val_every_n_epoch and isinstance(interval, int) and interval > steps and trainer.enable_validation:
        raise UserError(
            f"trainer.val_check_interval={interval} is more than the {steps} optimizer steps of an epoch: choose a "
            "smaller one, or set trainer.check_val_every_n_epoch to null to count across epochs"
        )


def _interval(trainer: L.Trainer) -> int | float | None:
    """Optimizer steps, or a share of an epoch, between two validations; None if it is a time."""
    return getattr(trainer, "val_check_interval", None)


def _validates(trainer: L.Trainer, lightnings_rule: Callable[[], bool]) -> bool:
    """Whether validation follows the micro-batch under way."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if not completes_step(trainer):
        return False
    ends_epochs = progress.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
    if trainer.global_step == trainer.max_steps or ends_epochs:
        return trainer.enable_validation
    interval = _interval(trainer)
    if not isinstance(interval, int) or stops_now(trainer):
        return lightnings_rule()
    per_epoch = trainer.check_val_every_n_epoch is not None
    steps = progress.current.ready // trainer.accumulate_grad_batches if per_epoch else trainer.global_step
    return validates_in_this_epoch(trainer) and steps % interval == 0


def _align_progress(trainer: L.Trainer) -> None:
    """Shift a continued run's number of micro-batches to the present accumulation.

    Lightning steps when the number of micro-batches in the epoch is a multiple of `accumulate_grad_batches`. The
    checkpoint has the number of the earlier run. After a change the first step would come early, with less data.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress.current
    steps = loop.automatic_optimization.optim_progress.optimizer.step.current.completed
    expected = steps * trainer.accumulate_grad_batches
    if steps and trainer.num_training_batches != float("inf"):
        expected = (expected - 1) % int(trainer.num_training_batches) + 1
    shift = expected - progress.ready
    for name in ("ready", "started", "processed", "completed"):
        setattr(progress, name, getattr(progress, name) + shift)
