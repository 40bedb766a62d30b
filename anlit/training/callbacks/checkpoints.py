"""`last.ckpt` to resume from and `best.ckpt` to keep, each complete or absent."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.utilities import rank_zero_info

from anlit.checkpoints.location import CHECKPOINTS, STEP_NAME, is_checkpoint
from anlit.checkpoints.newest import step_of
from anlit.errors import Preempted, RunError, UserError
from anlit.training.callbacks.whole_steps import is_last_step
from anlit.training.interruption import LOG_FAILED, Interruption
from anlit.training.lightning_internals import (
    callbacks_of_class,
    collect_log_errors,
    completes_step,
    may_stop_early,
    save_checkpoint_now,
    stop_asking_for_sigterm,
    validation_follows,
)
from anlit.training.strategies import FullySharded

WEIGHTS_NAME = "weights-{step:08d}"
"""The name of a checkpoint of weights alone, without `.ckpt`."""


class BestCheckpoint(ModelCheckpoint):
    """Keeps the checkpoint of the lowest validation loss as `checkpoints/best.ckpt`."""

    changes_learning = False

    def __init__(self, run_dir: str) -> None:
        settings: dict[str, Any] = {
            "save_on_train_epoch_end": False,
            "enable_version_counter": False,
        }
        super().__init__(Path(run_dir) / CHECKPOINTS, "best", monitor="val/loss", **settings)


class StepCheckpoints(ModelCheckpoint):
    """Keeps `checkpoints/step-00000400.ckpt` and so on, of some optimizer steps of the run.

    Args:
        steps: A number n for every n-th step, or a list of steps. Each number is 1 or more.
        save_weights_only: Leave out what continues a run. Such a file can only begin a run. Its
            name is `weights-00000400.ckpt`.
    """

    changes_learning = False

    def __init__(self, steps: int | list[int], save_weights_only: bool = False) -> None:
        numbers = steps if isinstance(steps, list) else [steps]
        if min(numbers, default=0) < 1:
            raise UserError(f"StepCheckpoints.steps={steps} is out of range: give steps from 1 on")
        settings: dict[str, Any] = {
            "auto_insert_metric_name": False,
            "save_top_k": -1,
            "every_n_train_steps": 1,
            "enable_version_counter": False,
        }
        name = WEIGHTS_NAME if save_weights_only else STEP_NAME
        super().__init__(filename=name, save_weights_only=save_weights_only, **settings)
        self.steps = steps

    @property
    def state_key(self) -> str:
        """Tells two of these callbacks apart in a checkpoint."""
        return f"{type(self).__qualname__}{self.steps}"

    def on_train_batch_end(self, trainer: L.Trainer, *batch: Any) -> None:
        if completes_step(trainer) and self._keeps(trainer.global_step):
            super().on_train_batch_end(trainer, *batch)

    def _keeps(self, step: int) -> bool:
        if isinstance(self.steps, int):
            return step % self.steps == 0
        return step in self.steps


class LastCheckpoint(ModelCheckpoint):
    """Keeps `checkpoints/last.ckpt`: written every n steps, after validation and at the end.

    A signal of `ENDING_SIGNALS` ends the run after the current optimizer step, with a checkpoint.
    With several ranks it ends after the next step. Nothing is lost, and the run can be continued
    exactly. The third Ctrl-C stops at once. The run ends in the same way if `max_time` is over
    before its last step, or if a logger cannot write.
    """

    changes_learning = False

    def __init__(self, run_dir: str, every_n_steps: int = 500) -> None:
        settings: dict[str, Any] = {
            "every_n_train_steps": every_n_steps,
            "enable_version_counter": False,
        }
        super().__init__(Path(run_dir) / CHECKPOINTS, "last", **settings)
        self.interruption = Interruption()
        self._time_is_over = False
        """Whether a Timer ends the launch at the end of an epoch."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.interruption.listen(trainer.strategy)
        collect_log_errors(trainer, self.interruption.note_log_error)
        stop_asking_for_sigterm(trainer)
        for callback in callbacks_of_class(trainer, ModelCheckpoint):
            replace_leftovers(callback, trainer.global_step)
        for timer in callbacks_of_class(trainer, Timer):
            check_time = partial(self._check_time, timer.on_train_batch_end)
            timer.on_train_batch_end = check_time  # type: ignore[method-assign]
            check_epoch = partial(self._check_time_of_epoch, timer.on_train_epoch_end)
            timer.on_train_epoch_end = check_epoch  # type: ignore[method-assign]

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.interruption.restore()

    def on_train_batch_end(self, trainer: L.Trainer, *batch: Any) -> None:
        if completes_step(trainer) and not validation_follows(trainer):
            self._stop_at_signal(trainer)
            # A later checkpoint would count the epoch as complete, and would have the weights that
            # a callback averages in on_train_end.
            if trainer.should_stop or is_last_step(trainer):
                save_checkpoint_now(self, trainer)
            super().on_train_batch_end(trainer, *batch)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save after a validation; a run resumed from a save before it would skip it."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._stop_at_signal(trainer)
            save_checkpoint_now(self, trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        save_checkpoint_now(self, trainer)
        _finish_writing(trainer)  # here an error still fails the run
        if trainer.strategy.broadcast(self.interruption.signal == LOG_FAILED):
            self.interruption.signal = LOG_FAILED
            _stop(trainer, self._ending_exception())
        has_steps_left = trainer.global_step < trainer.estimated_stepping_batches
        if self._time_is_over and has_steps_left:
            _stop(trainer, Preempted())

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Restore the signal handlers, and end the ranks that would wait for this rank.

        After an interrupt Lightning ends them, and `anlit fit` restores the handlers at its end.
        """
        super().on_exception(trainer, pl_module, exception)
        self.interruption.has_stopped = True
        if not isinstance(exception, KeyboardInterrupt):
            self.interruption.restore()
            _end_launched_ranks(trainer)

    def _check_time(self, check_time: Callable[..., None], trainer: L.Trainer, *batch: Any) -> None:
        """Replace a Timer's `on_train_batch_end`: the end of the time acts as Slurm's warning.

        A request to stop would add a validation and a row of metrics. A run of several launches
        would have another best checkpoint than a run of one launch, and less patience in
        EarlyStopping.
        """
        if trainer.should_stop or not may_stop_early(trainer):
            return
        check_time(trainer, *batch)
        if trainer.should_stop and not is_last_step(trainer):
            self.interruption.signal = self.interruption.signal or signal.SIGUSR1
        trainer.should_stop = False

    def _check_time_of_epoch(
        self, check_time: Callable[..., None], trainer: L.Trainer, *module: Any
    ) -> None:
        """Replace a Timer's `on_train_epoch_end`: note whether it is what asks to stop."""
        is_stopping = trainer.should_stop
        check_time(trainer, *module)
        if trainer.should_stop and not is_stopping:
            self._time_is_over = True

    def _stop_at_signal(self, trainer: L.Trainer) -> None:
        """End the run when its checkpoint is complete, if a signal has come.

        If a callback such as EarlyStopping ends the run at this step, nothing is left to continue.
        """
        is_ending = trainer.should_stop and may_stop_early(trainer)
        if self.interruption.all_ranks_stop() and not is_ending:
            save_checkpoint_now(self, trainer)
            _finish_writing(trainer)
            _stop(trainer, self._ending_exception())

    def _ending_exception(self) -> BaseException:
        """The exception that ends the run for its signal, after its checkpoint is complete."""
        if self.interruption.signal == signal.SIGINT:
            return KeyboardInterrupt()
        if self.interruption.signal != LOG_FAILED:
            return Preempted()
        error = self.interruption.log_error
        if isinstance(error, RunError):
            return error
        if isinstance(error, OSError):
            file = error.filename or "a log of the run"
            problem = f"{file} could not be written ({error.strerror or error})"
        else:
            problem = "another rank cannot write its logs"
        return RunError(
            f"{problem}: make room or repair the folder, then continue with --ckpt_path last"
        )


def end_after_log_error(trainer: L.Trainer, error: OSError) -> None:
    """Let the run end after this step, with a checkpoint, because a log cannot be written.

    Raises the error in a run without `LastCheckpoint`.
    """
    last_checkpoints = callbacks_of_class(trainer, LastCheckpoint)
    if not last_checkpoints:
        raise error
    last_checkpoints[0].interruption.note_log_error(error)


def is_out_of_time(trainer: L.Trainer) -> bool:
    """Whether `max_time` or a Timer has ended the launch."""
    remaining_times = [timer.time_remaining() for timer in callbacks_of_class(trainer, Timer)]
    return any(seconds is not None and seconds <= 0 for seconds in remaining_times)


def replace_leftovers(callback: ModelCheckpoint, step: int) -> None:
    """Let the callback replace files that a stopped launch wrote after `step`.

    Lightning would find these files and write a second file, such as `epoch=0-v1.ckpt`.
    """
    callback.file_exists = partial(_blocks_name, step)  # type: ignore[method-assign]


def _blocks_name(step: int, filepath: Any, trainer: L.Trainer) -> bool:
    """Whether a checkpoint exists that this process wrote, or that is of `step` or before."""
    exists = trainer.is_global_zero and is_checkpoint(filepath)
    if exists and str(filepath) not in getattr(trainer.strategy.checkpoint_io, "written", ()):
        exists = step_of(Path(filepath)) <= step
    return trainer.strategy.reduce_boolean_decision(exists, all=False)


def _stop(trainer: L.Trainer, exception: BaseException) -> NoReturn:
    """End the run after its checkpoint is complete."""
    trainer.strategy.barrier()
    _end_launched_ranks(trainer)
    step = trainer.global_step
    rank_zero_info(
        f"Stopped after step {step} and saved: the same command with --ckpt_path last continues"
    )
    raise exception


def _end_launched_ranks(trainer: L.Trainer) -> None:
    """End the ranks that Lightning started from this process.

    If Lightning's observer saw a rank end before this process, it would kill this process too. The
    exit status would not be the status of an interrupted run.
    """
    # The observer has the same list, so it observes no rank after this.
    children = getattr(trainer.strategy.launcher, "procs", [])
    while children:
        child = children.pop()
        child.kill()
        child.wait()


def _finish_writing(trainer: L.Trainer) -> None:
    """Wait for checkpoints that are being written in the background."""
    if isinstance(trainer.strategy, FullySharded):
        trainer.strategy.wait_for_checkpoints()
