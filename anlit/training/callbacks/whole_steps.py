"""Validation, checkpoints and the end of a run only between optimizer steps; Lightning counts micro-batches."""

from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from anlit.errors import UserError
from anlit.lightning_internals import completes_step, number_logged_steps, set_validation_rule


class WholeSteps(Checkpoint):
    """Counts `val_check_interval` in optimizer steps, and lets nothing come between the micro-batches of a step.

    A checkpoint within a step would lose the gradients of its micro-batches. An integer `val_check_interval` is a
    number of optimizer steps, of the run or, with `check_val_every_n_epoch`, of each epoch. A float is a share of an
    epoch. A time is checked after each step. The run's last step is always validated. A request to stop within a step
    (`max_time`) takes effect after it. The `step` in the logs is the number of the optimizer step, from 0.

    Lightning calls checkpoint callbacks after all others. This callback is one, so that it sees the others' requests.
    """

    def __init__(self) -> None:
        self._stop_after_step = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give Lightning the interval in micro-batches.

        Raises:
            UserError: An epoch, or the share of it between validations, does not end with a step or is too short.
        """

        def is_due(due_by_interval: Callable[[], bool]) -> bool:
            ends_epoch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            ends_run = ends_epoch and trainer.current_epoch + 1 == trainer.max_epochs
            ends_run = (ends_run or trainer.global_step == trainer.max_steps) and trainer.enable_validation
            return completes_step(trainer) and (due_by_interval() or ends_run)

        interval = getattr(trainer, "val_check_interval", None)  # None for a time
        if isinstance(interval, int):
            trainer.val_check_batch = interval * trainer.accumulate_grad_batches
        if trainer.num_training_batches != float("inf"):
            _check_epochs(trainer, int(trainer.num_training_batches), interval)
        _align_progress(trainer)
        set_validation_rule(trainer, is_due)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        # Lightning's own count is off by one if a run is continued after its end or with another interval.
        number_logged_steps(trainer, trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        asked, within = trainer.should_stop or self._stop_after_step, not completes_step(trainer)
        trainer.should_stop, self._stop_after_step = asked and not within, asked and within


def _check_epochs(trainer: L.Trainer, n_batches: int, interval: int | float | None) -> None:
    accumulated, between = trainer.accumulate_grad_batches, trainer.val_check_batch
    problem = ""
    if n_batches % accumulated:
        problem = (
            f"accumulate_grad_batches={accumulated} does not divide the {n_batches} batches of an epoch: choose one "
            "that does, or set trainer.limit_train_batches"
        )
    elif isinstance(between, int) and between % accumulated:
        problem = (
            f"val_check_interval={interval} is {between} of the {n_batches} batches of an epoch, which "
            f"trainer.accumulate_grad_batches={accumulated} does not divide: give a number of steps"
        )
    elif isinstance(between, int) and between > n_batches and trainer.check_val_every_n_epoch:
        problem = (
            f"val_check_interval={interval} is more than the {n_batches // accumulated} optimizer steps of an epoch: "
            "choose a smaller one, or set trainer.check_val_every_n_epoch to null to count across epochs"
        )
    if problem:
        raise UserError(f"trainer.{problem}")


def _align_progress(trainer: L.Trainer) -> None:
    """Shift a continued run's number of micro-batches to the present accumulation.

    Lightning steps when the number of micro-batches in the epoch is a multiple of `accumulate_grad_batches`. The
    checkpoint has the number of the earlier run. After a change the first step would come early, with less data.
    """
    loop, accumulated = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
    steps = loop.automatic_optimization.optim_progress.optimizer.step
    in_epoch = steps.current.completed * accumulated
    if in_epoch and trainer.num_training_batches != float("inf"):
        in_epoch = (in_epoch - 1) % int(trainer.num_training_batches) + 1
    batches = loop.batch_progress
    for progress, expected in ((batches.total, steps.total.completed * accumulated), (batches.current, in_epoch)):
        shift = expected - progress.ready
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress, name, getattr(progress, name) + shift)
