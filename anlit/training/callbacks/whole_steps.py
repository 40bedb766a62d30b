"""Validation, checkpoints and the end of a run only between optimizer steps; Lightning counts micro-batches."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from anlit.errors import UserError
from anlit.lightning_internals import completes_step, number_logged_steps, set_validation_rule


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
        """Give Lightning the interval in micro-batches.

        Raises:
            UserError: An epoch, or the share of it between validations, does not end with a step or is too short.
        """
        interval = getattr(trainer, "val_check_interval", None)  # None for a time
        if isinstance(interval, int):
            trainer.val_check_batch = interval * trainer.accumulate_grad_batches
        if trainer.num_training_batches != float("inf"):
            _check_epochs(trainer, int(trainer.num_training_batches), interval)
        _align_progress(trainer)
        set_validation_rule(trainer, lambda due: completes_step(trainer) and (due() or _ends_run(trainer)))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Lightning's own count is off by one if a run is continued after its end or with another interval.
        number_logged_steps(trainer, trainer.global_step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        asked = trainer.should_stop or self._stop_after_step
        within = not completes_step(trainer)
        trainer.should_stop, self._stop_after_step = asked and not within, asked and within


def _check_epochs(trainer: L.Trainer, n_batches: int, interval: int | float | None) -> None:
    accumulated, between = trainer.accumulate_grad_batches, trainer.val_check_batch
    if n_batches % accumulated:
        raise UserError(
            f"trainer.accumulate_grad_batches={accumulated} does not divide the {n_batches} batches of an epoch: "
            "choose one that does, or set trainer.limit_train_batches"
        )
    if isinstance(between, int) and between % accumulated:
        raise UserError(
            f"trainer.val_check_interval={interval} is {between} of the {n_batches} batches of an epoch, which "
            f"trainer.accumulate_grad_batches={accumulated} does not divide: give a number of steps"
        )
    if isinstance(between, int) and between > n_batches and trainer.check_val_every_n_epoch:
        raise UserError(
            f"trainer.val_check_interval={interval} is more than the {n_batches // accumulated} optimizer steps of an "
            "epoch: choose a smaller one, or set trainer.check_val_every_n_epoch to null to count across epochs"
        )


def _ends_run(trainer: L.Trainer) -> bool:
    """Whether the micro-batch under way is the run's last one, and there is something to validate."""
    last_batch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    last = trainer.global_step == trainer.max_steps or (last_batch and trainer.current_epoch + 1 == trainer.max_epochs)
    return last and trainer.enable_validation


def _align_progress(trainer: L.Trainer) -> None:
    """Shift a continued run's number of micro-batches to the present accumulation.

    Lightning steps when the number of micro-batches in the epoch is a multiple of `accumulate_grad_batches`. The
    checkpoint has the number of the earlier run. After a change the first step would come early, with less data.
    """
    loop = trainer.fit_loop.epoch_loop
    steps = loop.automatic_optimization.optim_progress.optimizer.step
    for progress, n_steps in (
        (loop.batch_progress.total, steps.total.completed),
        (loop.batch_progress.current, steps.current.completed),
    ):
        expected = n_steps * trainer.accumulate_grad_batches
        if progress is loop.batch_progress.current and n_steps and trainer.num_training_batches != float("inf"):
            expected = (expected - 1) % int(trainer.num_training_batches) + 1
        shift = expected - progress.ready
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress, name, getattr(progress, name) + shift)
