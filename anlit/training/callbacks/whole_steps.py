"""Lets validation, checkpoints and the end of a run come only between optimizer steps.

Lightning counts micro-batches, and `accumulate_grad_batches` of them make a step. So it could
validate, save or stop within a step.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, Timer

from anlit.errors import UserError
from anlit.training.host_broadcast import broadcast_on_host
from anlit.training.lightning_internals import (
    call_before_fetches,
    completes_step,
    number_logged_steps,
    set_validation_rule,
    shift_progress,
    validation_follows,
)

_log = logging.getLogger(__name__)


class WholeSteps(Checkpoint):
    """Counts `val_check_interval` in optimizer steps, and lets nothing come within a step.

    A checkpoint within a step would lose the gradients of its micro-batches. All callbacks save by
    `trainer.save_checkpoint`, which this callback replaces. A call waits for the step's end, and
    for a validation at this step.

    An integer `val_check_interval` is a number of optimizer steps. It counts them in the run, or in
    each epoch with `check_val_every_n_epoch`. A float is a share of an epoch. A time is checked
    after each step, by the clock of rank 0. The run's last step is always validated. A request to
    stop within a step takes effect after the step. The `step` in the logs is the number of the
    optimizer step, from 0.

    Lightning calls checkpoint callbacks last. So this callback sees the requests and states of all
    callbacks. Place it before other checkpoint callbacks. At their turn the step has ended, and
    they save at once.
    """

    changes_learning = False
    """Runs with and without this callback belong to one configuration."""

    def __init__(self) -> None:
        self._stop_after_step = False
        """Whether something has asked within the current step to stop."""
        self._has_trained = False
        """Whether a batch has begun since the start of training, or since it was continued."""
        self._is_within_step = False
        self._n_micro_batches = 1
        """Micro-batches per step."""
        self._waiting_saves: dict[str, dict[str, Any]] = {}
        """Path → the arguments of a `save_checkpoint` that waits for the step's end."""
        self._asked_at: tuple[int, bool] | None = None
        """When rank 0 was last asked whether to validate: micro-batches, and `should_stop`."""
        self._answer = False
        """The answer of rank 0."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give Lightning the interval in micro-batches.

        Raises UserError if epochs or intervals do not end with a step.
        """
        interval = getattr(trainer, "val_check_interval", None)  # None for a time
        if isinstance(interval, int):
            trainer.val_check_batch = interval * trainer.accumulate_grad_batches
        _refuse_split_steps(trainer, interval)
        _align_progress(trainer)
        self._has_trained = False
        self._is_within_step = False
        self._n_micro_batches = trainer.accumulate_grad_batches
        self._waiting_saves = {}
        self._asked_at = None
        broadcast_on_host(trainer)
        # A fetch moves on in the data. A checkpoint would now skip the fetched batch.
        call_before_fetches(trainer, self._begin_batch)
        trainer.save_checkpoint = partial(self._save, trainer)  # type: ignore[method-assign]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            _count_whole_steps(callback)
        set_validation_rule(trainer, partial(self._is_validation_due, trainer, interval))

    def _is_validation_due(
        self, trainer: L.Trainer, interval: Any, is_due_by_rule: Callable[[], bool]
    ) -> bool:
        """Whether to validate after the current batch.

        `interval` is `val_check_interval`; None for a time. `is_due_by_rule` is Lightning's rule.
        """
        is_end_of_epoch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if is_end_of_epoch and not self._has_trained:
            # The run continues from the validation after an epoch's last step, and Lightning asks
            # before any batch. Without this answer it would take one more step in that epoch.
            return True
        if not completes_step(trainer):
            return False
        is_due = is_due_by_rule() or (trainer.enable_validation and is_last_step(trainer))
        return self._ask_first_rank(trainer, is_due) if interval is None else is_due

    def _ask_first_rank(self, trainer: L.Trainer, is_due: bool) -> bool:
        """Rank 0's answer, which all ranks need if validations come by the clock: clocks differ.

        Callbacks and Lightning ask several times after a step. The first answer holds for the step,
        unless a request to stop has come since.
        """
        n_micro_batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        moment = (n_micro_batches, trainer.should_stop)
        if moment != self._asked_at:
            self._asked_at = moment
            self._answer = trainer.strategy.broadcast(is_due)
        return self._answer

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        # Lightning's count of logged steps is sometimes off by one. This happens if a run continues
        # after its end or with another interval.
        number_logged_steps(trainer, trainer.global_step)
        self._has_trained = True
        if trainer.accumulate_grad_batches != self._n_micro_batches:
            raise UserError(
                "a callback has changed trainer.accumulate_grad_batches from "
                f"{self._n_micro_batches} to {trainer.accumulate_grad_batches}, and steps of a run "
                "have one size: leave it out, or give BatchRamp"
            )

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        # Lightning reads `should_stop` after this hook, so within a step it is put off.
        is_stopping = trainer.should_stop or self._stop_after_step
        is_step_complete = completes_step(trainer)
        trainer.should_stop = is_stopping and is_step_complete
        self._stop_after_step = is_stopping and not is_step_complete
        if is_step_complete and not validation_follows(trainer):
            self._end_step(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end_step(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end_step(trainer)

    def _begin_batch(self) -> None:
        self._is_within_step = True

    def _end_step(self, trainer: L.Trainer) -> None:
        """Write the checkpoints that have waited for the step's end."""
        self._is_within_step = False
        waiting_saves, self._waiting_saves = self._waiting_saves, {}
        for path, settings in waiting_saves.items():
            trainer.save_checkpoint(path, **settings)

    def _save(
        self,
        trainer: L.Trainer,
        filepath: str | Path,
        weights_only: bool | None = None,
        storage_options: Any = None,
    ) -> None:
        """Replace `trainer.save_checkpoint`: write at once between steps, else at the step's end.

        If an error ends the run within a step, nothing is written. A line in the log says so.
        """
        settings = {"weights_only": weights_only, "storage_options": storage_options}
        if not self._is_within_step:
            # The class's method: the object's own is this function.
            type(trainer).save_checkpoint(trainer, filepath, **settings)
        elif trainer.interrupted:
            _log.warning(
                f"{filepath} is not written, because the run ended within step "
                f"{trainer.global_step + 1}: continue from an earlier checkpoint"
            )
        else:
            self._waiting_saves[str(filepath)] = settings


def is_last_step(trainer: L.Trainer) -> bool:
    """Whether the current batch is the run's last by max_steps or max_epochs."""
    is_end_of_epoch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    is_end_of_epochs = is_end_of_epoch and trainer.current_epoch + 1 == trainer.max_epochs
    return is_end_of_epochs or trainer.global_step == trainer.max_steps


def _refuse_split_steps(trainer: L.Trainer, interval: Any) -> None:
    """Raise UserError if an epoch or validation interval would end within a step."""
    n_micro_batches = trainer.accumulate_grad_batches
    n_batches = trainer.num_training_batches
    if n_batches == float("inf"):
        return
    batches_between = n_micro_batches
    if isinstance(trainer.val_check_batch, int):
        batches_between = trainer.val_check_batch
    splits_step = n_batches % n_micro_batches or batches_between % n_micro_batches
    exceeds_epoch = trainer.check_val_every_n_epoch and batches_between > n_batches
    if splits_step or exceeds_epoch:
        raise UserError(
            f"trainer.val_check_interval={interval} is {batches_between} of the {n_batches} "
            f"batches of an epoch, and trainer.accumulate_grad_batches={n_micro_batches} make a "
            "step: give whole steps that fit into an epoch, set trainer.limit_train_batches, or "
            "count across epochs with trainer.check_val_every_n_epoch null"
        )


def _count_whole_steps(callback: L.Callback) -> None:
    """Let Lightning's ModelCheckpoint and Timer check the time and the step after whole steps only.

    Otherwise a checkpoint's file would have the name of the step before, and ranks would ask for
    the time after every micro-batch.
    """
    for kind in (ModelCheckpoint, Timer):
        is_overridden = type(callback).on_train_batch_end is not kind.on_train_batch_end
        if isinstance(callback, kind) and not is_overridden:
            at_end_of_step = partial(_at_end_of_step, callback)
            callback.on_train_batch_end = at_end_of_step  # type: ignore[method-assign]


def _at_end_of_step(callback: L.Callback, trainer: L.Trainer, *batch: Any) -> None:
    """Replace the callback's `on_train_batch_end`; `batch` are its further arguments."""
    if completes_step(trainer):
        type(callback).on_train_batch_end(callback, trainer, *batch)


def _align_progress(trainer: L.Trainer) -> None:
    """Shift a continued run's count of micro-batches to the current `accumulate_grad_batches`.

    Lightning steps when its count is a multiple of `accumulate_grad_batches`. This number may have
    changed.
    """
    loop = trainer.fit_loop.epoch_loop
    n_micro_batches = trainer.accumulate_grad_batches
    epochs = trainer.fit_loop.epoch_progress.current
    if loop.restarted_on_train_batch_end and epochs.ready == epochs.completed:
        # The checkpoint is of an epoch's last step. Lightning would not start the next epoch.
        trainer.fit_loop.reset_restart_stage()
    steps = loop.automatic_optimization.optim_progress.optimizer.step
    n_in_epoch = steps.current.completed * n_micro_batches
    if n_in_epoch:
        n_in_epoch = int((n_in_epoch - 1) % trainer.num_training_batches) + 1
    total, current = loop.batch_progress.total, loop.batch_progress.current
    shift_progress(total, steps.total.completed * n_micro_batches - total.ready)
    shift_progress(current, n_in_epoch - current.ready)
