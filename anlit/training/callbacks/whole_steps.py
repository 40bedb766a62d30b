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
    number of optimizer steps, of the run or, with `check_val_every_n_epoch`, of each epoch; a float is a share of an
    epoch; a time is checked after each step. The run's last step is always validated. A request to stop within a step
    (`max_time`) takes effect after it. The `step` in the logs is the number of the optimizer step, from 0.

    Lightning calls checkpoint callbacks after all others, so this one sees the others' requests.
    """

    _stop_after_step = _has_begun = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give Lightning the interval in micro-batches; UserError if epochs or intervals do not end with a step."""
        accumulated, n_batches = trainer.accumulate_grad_batches, trainer.num_training_batches
        interval = getattr(trainer, "val_check_interval", None)  # None for a time
        if isinstance(interval, int):
            trainer.val_check_batch = interval * accumulated
        between = (
            trainer.val_check_batch if isinstance(trainer.val_check_batch, int) else accumulated
        )
        within_step = n_batches % accumulated or between % accumulated
        if n_batches != float("inf") and (
            within_step or (trainer.check_val_every_n_epoch and between > n_batches)
        ):
            raise UserError(
                f"trainer.val_check_interval={interval} is {between} of the {n_batches} batches of an epoch, and "
                f"trainer.accumulate_grad_batches={accumulated} make a step: give whole steps that fit into an epoch, "
                "set trainer.limit_train_batches, or count across epochs with trainer.check_val_every_n_epoch null"
            )
        _align_progress(trainer)
        self._has_begun = False

        def is_due(due_by_interval: Callable[[], bool]) -> bool:
            ends_epoch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            if (
                ends_epoch and not self._has_begun
            ):  # the checkpoint is of the validation after an epoch's last step
                return True  # or Lightning would take one more step in that epoch
            ends_run = ends_epoch and trainer.current_epoch + 1 == trainer.max_epochs
            ends_run = (
                ends_run or trainer.global_step == trainer.max_steps
            ) and trainer.enable_validation
            return completes_step(trainer) and (due_by_interval() or ends_run)

        set_validation_rule(trainer, is_due)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        # Lightning's own count is off by one if a run is continued after its end or with another interval.
        number_logged_steps(trainer, trainer.global_step)
        self._has_begun = True

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        asked, within = trainer.should_stop or self._stop_after_step, not completes_step(trainer)
        trainer.should_stop, self._stop_after_step = asked and not within, asked and within


def _align_progress(trainer: L.Trainer) -> None:
    """Shift a continued run's number of micro-batches to the present accumulation.

    Lightning steps when that number in the epoch is a multiple of `accumulate_grad_batches`, which may have changed.
    """
    loop, accumulated = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
    steps, batches = loop.automatic_optimization.optim_progress.optimizer.step, loop.batch_progress
    in_epoch = steps.current.completed * accumulated
    in_epoch = in_epoch and int((in_epoch - 1) % trainer.num_training_batches) + 1
    for progress, expected in (
        (batches.total, steps.total.completed * accumulated),
        (batches.current, in_epoch),
    ):
        shift = expected - progress.ready
        for name, count in vars(progress).items():
            setattr(progress, name, count + shift)
