"""Validation, checkpoints and the end of a run only between optimizer steps; Lightning counts micro-batches."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from anlit.errors import UserError
from anlit.training.lightning_internals import (
    before_each_fetch,
    completes_step,
    number_logged_steps,
    set_validation_rule,
    validation_follows,
)

_log = logging.getLogger(__name__)


class WholeSteps(Checkpoint):
    """Counts `val_check_interval` in optimizer steps, and lets nothing come between the micro-batches of a step.

    A checkpoint within a step would lose the gradients of its micro-batches. So `trainer.save_checkpoint`, through
    which everything saves, waits for the step's end, and for the validation that is due there.

    An integer `val_check_interval` is a number of optimizer steps, of the run or, with `check_val_every_n_epoch`, of
    each epoch; a float is a share of an epoch; a time is checked after each step. The run's last step is always
    validated. A request to stop within a step (`max_time`) takes effect after it. The `step` in the logs is the number
    of the optimizer step, from 0.

    Lightning calls checkpoint callbacks after all others, so this one sees the others' requests and states. Place it
    before other checkpoint callbacks: at their turn the step has ended, and they save at once.
    """

    def __init__(self) -> None:
        self._stop_after_step = self._has_begun = False
        self._is_within_step = False
        self._accumulated = 1
        self._waiting_saves: dict[str, dict[str, Any]] = {}

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
        self._has_begun = self._is_within_step = False
        self._accumulated = accumulated
        self._waiting_saves = {}
        before_each_fetch(trainer, self._begin_batch)
        trainer.save_checkpoint = partial(self._save, trainer)  # type: ignore[method-assign]
        for callback in trainer.checkpoint_callbacks:
            _count_whole_steps(callback)

        def is_due(due_by_rule: Callable[[], bool]) -> bool:
            ends_epoch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            if (
                ends_epoch and not self._has_begun
            ):  # the checkpoint is of the validation after an epoch's last step
                return True  # or Lightning would take one more step in that epoch
            if not completes_step(trainer):
                return False
            is_due_here = due_by_rule() or (trainer.enable_validation and is_last_step(trainer))
            if interval is None:  # a time, and clocks of ranks differ
                is_due_here = trainer.strategy.broadcast(is_due_here)
            return is_due_here

        set_validation_rule(trainer, is_due)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        # Lightning's own count is off by one if a run is continued after its end or with another interval.
        number_logged_steps(trainer, trainer.global_step)
        self._has_begun = True
        if trainer.accumulate_grad_batches != self._accumulated:
            raise UserError(
                f"a callback has changed trainer.accumulate_grad_batches from {self._accumulated} to "
                f"{trainer.accumulate_grad_batches}, and steps of a run have one size: leave it out"
            )

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        asked, within = trainer.should_stop or self._stop_after_step, not completes_step(trainer)
        trainer.should_stop, self._stop_after_step = asked and not within, asked and within
        if not within and not validation_follows(trainer):
            self._end_step(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end_step(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end_step(trainer)

    def _begin_batch(self) -> None:
        self._is_within_step = True

    def _end_step(self, trainer: L.Trainer) -> None:
        """Write the checkpoints that were asked for within the step."""
        self._is_within_step = False
        waiting, self._waiting_saves = self._waiting_saves, {}
        for path, settings in waiting.items():
            trainer.save_checkpoint(path, **settings)

    def _save(
        self,
        trainer: L.Trainer,
        filepath: str | Path,
        weights_only: bool | None = None,
        storage_options: Any = None,
    ) -> None:
        """Stand for `trainer.save_checkpoint`: write now between steps, else at the step's end.

        A run that ends by an error within a step has none: nothing is written then, and a line says so.
        """
        settings = {"weights_only": weights_only, "storage_options": storage_options}
        if not self._is_within_step:
            type(trainer).save_checkpoint(trainer, filepath, **settings)
        elif trainer.interrupted:
            _log.warning(
                f"{filepath} is not written, because the run ended within step "
                f"{trainer.global_step + 1}: continue from an earlier checkpoint"
            )
        else:
            self._waiting_saves[str(filepath)] = settings


def is_last_step(trainer: L.Trainer) -> bool:
    """Whether the batch under way is the last one of the run, as far as steps and epochs tell."""
    ends_epoch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    ends_last_epoch = ends_epoch and trainer.current_epoch + 1 == trainer.max_epochs
    return ends_last_epoch or trainer.global_step == trainer.max_steps


def _count_whole_steps(callback: Checkpoint) -> None:
    """Let Lightning's ModelCheckpoint look at the time and the step after whole steps only.

    Its file would otherwise be named after the step before the one that it holds.
    """
    looks_by_itself = type(callback).on_train_batch_end is not ModelCheckpoint.on_train_batch_end
    if isinstance(callback, ModelCheckpoint) and not looks_by_itself:
        callback.on_train_batch_end = partial(_at_end_of_step, callback)  # type: ignore[method-assign]


def _at_end_of_step(callback: ModelCheckpoint, trainer: L.Trainer, *batch: Any) -> None:
    if completes_step(trainer):
        ModelCheckpoint.on_train_batch_end(callback, trainer, *batch)


def _align_progress(trainer: L.Trainer) -> None:
    """Shift a continued run's number of micro-batches to the present accumulation.

    Lightning steps when that number in the epoch is a multiple of `accumulate_grad_batches`, which may have changed.
    """
    loop, accumulated = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
    epochs = trainer.fit_loop.epoch_progress.current
    if loop.restarted_on_train_batch_end and epochs.ready == epochs.completed:
        # The checkpoint is of an epoch's last step. Lightning would not count the next epoch as begun.
        trainer.fit_loop.reset_restart_stage()
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
