"""The callbacks, loggers and plugins that every run gives its Trainer.

Those of the configuration come on top. A run with `fast_dev_run` writes nothing.
"""

from typing import Any

from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.callbacks import Callback, ProgressBar, Timer
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from anlit.checkpoints.checkpoint_io import AtomicCheckpointIO
from anlit.config.labels import as_list, class_name
from anlit.config.trackers import explain_missing_package
from anlit.errors import UserError
from anlit.training.callbacks.checkpoints import BestCheckpoint, LastCheckpoint
from anlit.training.callbacks.finite import FiniteCheckpoints, StopOnNonFinite
from anlit.training.callbacks.loss_guard import LossGuard
from anlit.training.callbacks.norms import NormMonitor
from anlit.training.callbacks.progress import RunDescription, RunProgress
from anlit.training.callbacks.random_state import RandomState
from anlit.training.callbacks.run_record import RunRecord
from anlit.training.callbacks.throughput import Throughput
from anlit.training.callbacks.whole_steps import WholeSteps
from anlit.training.loggers import MetricsCSV, MetricsOnResume
from anlit.training.refusals import refusals


def training_callbacks(
    trainer: Any, record: RunRecord, checkpoint_every_n_steps: int
) -> list[Callback]:
    """Return all callbacks of `anlit fit`, in the order in which Lightning calls them.

    Args:
        trainer: The configuration's settings of the Trainer, with objects in place of classes.
        record: Writes the record of the run; the checkpoints go beside it.
        checkpoint_every_n_steps: Steps between two writes of last.ckpt.
    """
    run_dir = str(record.path.parent)
    configured = as_list(trainer.get("callbacks"))
    _refuse_twins(configured)
    _refuse_two_time_limits(trainer, configured)
    callbacks: list[Callback] = [Throughput()]
    if trainer.get("enable_progress_bar") is not False:
        callbacks.append(RunDescription())  # before a progress bar is drawn
    if not trainer.get("fast_dev_run"):
        callbacks.append(WholeSteps())  # before all callbacks that save
    callbacks += configured
    if not has_instance(configured, LossGuard):
        callbacks.append(StopOnNonFinite())
    callbacks.append(FiniteCheckpoints())
    callbacks += progress_callbacks(trainer)
    callbacks += [NormMonitor(), RandomState(), MetricsOnResume()]
    if not trainer.get("fast_dev_run"):
        callbacks += [
            record,
            BestCheckpoint(run_dir),
            LastCheckpoint(run_dir, checkpoint_every_n_steps),
        ]
    callbacks.append(refusals)
    return callbacks


def _refuse_twins(callbacks: list[Callback]) -> None:
    """Raise UserError for two callbacks with one name for their state in checkpoints."""
    state_keys = set()
    for callback in callbacks:
        has_state = type(callback).state_dict is not Callback.state_dict
        if has_state and callback.state_key in state_keys:
            raise UserError(
                f"trainer.callbacks has {type(callback).__name__} twice, and a checkpoint holds "
                "the state of one: leave one out, such as a configuration file that adds it again"
            )
        state_keys.add(callback.state_key)


def _refuse_two_time_limits(trainer: Any, callbacks: list[Callback]) -> None:
    """Raise UserError for `max_time` beside a Timer, because Lightning drops `max_time` then."""
    if trainer.get("max_time") is not None and has_instance(callbacks, Timer):
        raise UserError(
            "trainer.max_time and the Timer of trainer.callbacks both limit the time of a launch, "
            "and a run has one such limit: leave one out"
        )


def evaluation_callbacks(trainer: Any) -> list[Callback]:
    """Return all callbacks of `anlit validate` and `anlit test`."""
    return [*as_list(trainer.get("callbacks")), *progress_callbacks(trainer)]


def progress_callbacks(trainer: Any) -> list[Callback]:
    """Return anlit's progress line, unless the configuration has another or none."""
    has_progress_bar = has_instance(as_list(trainer.get("callbacks")), ProgressBar)
    if has_progress_bar or trainer.get("enable_progress_bar") is False:
        return []
    return [RunProgress()]


def check_trackers(loggers: Any) -> None:
    """Raise UserError if a configured logger needs a package that is not installed."""
    for logger in as_list(loggers):
        sentence = explain_missing_package(class_name(getattr(logger, "class_path", "")))
        if sentence:
            raise UserError(sentence)


def training_loggers(trainer: Any, run_dir: str) -> list[Logger] | bool:
    """Return all loggers of `anlit fit`; False if the configuration turns logging off."""
    setting = trainer.get("logger")
    if setting is False:
        return False
    configured = [] if setting is True else as_list(setting)
    loggers: list[Logger] = [MetricsCSV(run_dir)]
    if not has_instance(configured, TensorBoardLogger):
        loggers.append(TensorBoardLogger(run_dir, "", ""))
    return [*loggers, *configured]


def trainer_plugins(trainer: Any) -> list[Any]:
    """Return all plugins of a Trainer, with the environment of SLURM inside a job."""
    plugins = [*as_list(trainer.get("plugins")), AtomicCheckpointIO()]
    # torchrun may run in a job of SLURM, and then says which ranks there are.
    is_started_by_slurm = SLURMEnvironment.detect() and not TorchElasticEnvironment.detect()
    if is_started_by_slurm and not has_instance(plugins, ClusterEnvironment):
        # train.sbatch requeues a job after anlit's checkpoint; Lightning does not.
        plugins.append(SLURMEnvironment(auto_requeue=False))
    return plugins


def has_instance(objects: list[Any], kind: type) -> bool:
    return any(isinstance(candidate, kind) for candidate in objects)
