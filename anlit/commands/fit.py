"""`anlit fit | validate | test`: LightningCLI with anlit's run folder, callbacks and loggers."""

import logging
import os
import signal
import warnings
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from pydoc import locate
from typing import IO, Any

import lightning as L
import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only

from anlit.checkpoints.checkpoint_io import AtomicCheckpointIO, refuse_damaged
from anlit.checkpoints.location import CHECKPOINTS, LAST, checkpoint_of_run, find_checkpoint
from anlit.checkpoints.special_tokens import text_folder
from anlit.commands.failures import quiet_log_threads, run_error
from anlit.commands.parser import ConfigurationParser, changes_of_class, origin, read_command
from anlit.commands.wandb_run import finish_wandb_run, wandb_run
from anlit.config.error_messages import is_of_lightning, of_constructor, of_lightning
from anlit.config.labels import class_name
from anlit.config.objects import subclass_named
from anlit.data.checks import padded_vocabulary
from anlit.data.module import TokenShards
from anlit.errors import PREEMPTED, RUN_FOLDER, Preempted, RunError, UserError
from anlit.nn.models.runtime import flush_denormals
from anlit.reporting.text import echo, lasting_output
from anlit.signals import ENDING
from anlit.training import run_folder
from anlit.training.callbacks.checkpoints import BestCheckpoint, LastCheckpoint
from anlit.training.callbacks.finite import FiniteCheckpoints, StopOnNonFinite
from anlit.training.callbacks.loss_guard import LossGuard
from anlit.training.callbacks.norms import NormMonitor
from anlit.training.callbacks.progress import RunProgress
from anlit.training.callbacks.random_state import RandomState
from anlit.training.callbacks.run_record import RunRecord
from anlit.training.callbacks.throughput import Throughput
from anlit.training.callbacks.whole_steps import WholeSteps
from anlit.training.lightning_internals import CommandLine, start_method, wrap_on_current_stream
from anlit.training.load_model import load_initial_weights
from anlit.training.loggers import MetricsCSV, MetricsOnResume
from anlit.training.optim.optimizers import AdamW, rate_of_width
from anlit.training.refusals import refusals
from anlit.training.run_folder import checkpoint_to_continue, checkpoint_to_evaluate
from anlit.training.support import check_strategy


class SaveConfigOfTraining(SaveConfigCallback):
    """Writes config.yaml when training starts, so that a refused continuation does not change it.

    It has no ckpt_path, so `anlit validate --config RUN/config.yaml` evaluates a continued run's best checkpoint too.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write nothing yet."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.config.ckpt_path = None
        super().setup(trainer, pl_module, "fit")


class FitCommand(ConfigurationParser):
    """LightningCLI whose `fit` writes one run folder: config, record, metrics, TensorBoard, checkpoints."""

    lock: IO[str] | None = None
    """The locked file in the run folder; None on other ranks than the first, and if nothing is written."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        given_run_dir = config.run_dir
        name = class_name(config.model.class_path).lower()
        config.run_dir = given_run_dir or f"runs/{name}-seed{config.seed_everything}"
        files = [str(path) for path in config.config or []]
        if self.subcommand != "fit":
            config.ckpt_path = checkpoint_to_evaluate(
                config.ckpt_path, given_run_dir, files, str(self.subcommand)
            )
            rank_zero_only(echo)(f"{self.subcommand}: {config.ckpt_path}")
            return
        if config.ckpt_path in ("last", "best"):
            run_folder.refuse_moved_run(config.run_dir, files)
        for sentence in changes_of_class(config):
            rank_zero_only(echo)(sentence)
        if not config.trainer.fast_dev_run:
            run_folder.make_run_folder(config.run_dir)
            RUN_FOLDER.set(config.run_dir)
        config.ckpt_path = checkpoint_to_continue(
            config.run_dir, config.ckpt_path, config.checkpoint_every_n_steps
        )
        if config.initial_weights is not None and config.ckpt_path not in (None, "last"):
            both = f"initial_weights={config.initial_weights} and ckpt_path={config.ckpt_path}"
            fix = "give initial_weights to start a run from them, or ckpt_path to continue one"
            raise UserError(f"{both} both name weights: {fix}")

    def run(self, subcommand: str) -> None:
        try:
            CommandLine.run(self, subcommand)
        except UserError:
            raise
        except Exception as error:
            self._raise_if_signalled(error)
            if not isinstance(error, RuntimeError | MisconfigurationException):
                raise
            if not is_of_lightning(error):
                raise
            raise UserError(of_lightning(error)) from error

    def _raise_if_signalled(self, error: Exception) -> None:
        """End as a signal ends a run if one had come: it may have killed what the error is about.

        A signal to a whole process group also reaches compilers and processes of foreign code.
        """
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if (
                not isinstance(callback, LastCheckpoint)
                or callback.interruption.signal not in ENDING
            ):
                continue
            if callback.interruption.signal != signal.SIGINT:
                raise Preempted from error
            fix = "continue with --ckpt_path last"
            raise RunError(f"Ctrl-C ended the run before its step was complete: {fix}") from error

    def before_fit(self) -> None:
        initial_weights, run_dir, ckpt_path = map(
            self.setting, ("initial_weights", "run_dir", "ckpt_path")
        )
        self.model.accept_changes = self.setting("accept_changes")
        if self.trainer.is_global_zero:
            if not self.setting("trainer")["fast_dev_run"]:
                self.lock = run_folder.lock_run_folder(run_dir)
                # The folder may have been another run's between the first look and the lock.
                every_n_steps = self.setting("checkpoint_every_n_steps")
                checkpoint_to_continue(run_dir, ckpt_path, every_n_steps, announce=False)
            path = (
                Path(run_dir) / CHECKPOINTS / LAST if ckpt_path == "last" else Path(ckpt_path or "")
            )
            if ckpt_path is not None and os.path.lexists(path):
                refuse_damaged(path)
        continues = ckpt_path == "last" and checkpoint_of_run(run_dir, (LAST,)) is not None
        if initial_weights is not None and not continues:
            load_initial_weights(self.model, initial_weights)
            if self.unchosen_rate is not None:
                rank_zero_only(echo)(
                    f"initial_weights={initial_weights} are trained, but {self.unchosen_rate}"
                )
            self.model.text_folder = text_folder(find_checkpoint(initial_weights))
        elif ckpt_path not in (None, "last"):
            self.model.text_folder = text_folder(Path(ckpt_path))

    def _unchosen_rate(self) -> str | None:
        """What to say where nobody chose the learning rate: it is one for new weights. None if it is chosen."""
        optimizer = self.config[self.subcommand].model.init_args.get("optimizer")
        if optimizer is None:
            return None
        kind = subclass_named(torch.optim.Optimizer, optimizer.class_path, "model.optimizer")
        parameter = signature(kind).parameters.get("lr")
        rate = optimizer.init_args.get("lr")
        if rate is None:
            source = "null, which follows the model's width"
        elif parameter is not None and rate == parameter.default:
            source = f"{rate:g}, the default"
        else:
            return None
        return (
            f"model.optimizer.lr is {source}, a rate for new weights: set a lower one, such as "
            "--model.optimizer.lr 3e-5"
        )

    def before_validate(self) -> None:
        self.model.accept_changes = self.setting("accept_changes")

    before_test = before_validate

    def after_fit(self) -> None:
        if self.lock is not None:
            self.lock.close()
        if self.trainer.is_global_zero:
            finish_wandb_run()

    def instantiate_classes(self) -> None:
        try:
            self._set_vocabulary_from_data()
            config = self.config[self.subcommand]
            self.unchosen_rate = self._unchosen_rate()
            set_rate_by_size(config.model)
            with wandb_run(config, config.run_dir) if self.subcommand == "fit" else nullcontext():
                LightningCLI.instantiate_classes(self)
        except (ValueError, TypeError, MisconfigurationException) as error:
            culprit: Any = origin(error) if isinstance(error, ValueError) else error
            if isinstance(culprit, TypeError) and "CPUAccelerator" not in str(
                culprit
            ):  # a mistake in the code
                raise
            said = of_constructor(culprit) if isinstance(error, ValueError) else of_lightning(error)
            raise UserError(said) from error

    def _set_vocabulary_from_data(self) -> None:
        """Set a missing vocab_size to that of the data, which is prepared first if necessary."""
        config = self.config[self.subcommand]
        settings = config.model.get("init_args", {})
        if "vocab_size" not in settings or settings.vocab_size is not None:
            return
        parser = (
            ArgumentParser()
        )  # a new parser, because Lightning's would store the present configuration
        parser.add_subclass_arguments(TokenShards, "data")
        data = parser.instantiate(Namespace(data=config.data)).data
        data.prepare_data()
        settings.vocab_size = padded_vocabulary(data.vocab_size)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Add the callbacks, loggers and plugins that every run has to those of the configuration."""
        trainer, run_dir = self.setting("trainer", default={}), self.setting("run_dir")
        callbacks, logger = _as_list(trainer.get("callbacks")), trainer.get("logger")

        def configured(kind: type, among: list[Any] = callbacks) -> bool:
            return any(isinstance(part, kind) for part in among)

        is_silent = configured(ProgressBar) or trainer.get("enable_progress_bar") is False
        progress = [] if is_silent else [RunProgress()]
        if self.subcommand == "fit":
            kwargs["default_root_dir"] = run_dir
            of_real_runs = [
                RunRecord(run_dir),
                BestCheckpoint(run_dir),
                LastCheckpoint(run_dir, self.setting("checkpoint_every_n_steps")),
            ]
            is_dev_run = bool(trainer.get("fast_dev_run"))
            callbacks = [
                Throughput(),
                *([] if is_dev_run else [WholeSteps()]),  # before all that save
                *callbacks,
                *([] if configured(LossGuard) else [StopOnNonFinite()]),
                FiniteCheckpoints(),
                *progress,
                NormMonitor(),
                RandomState(),
                MetricsOnResume(),
                *([] if is_dev_run else of_real_runs),  # a dev run writes nothing
                refusals,
            ]
            if logger is not False:
                own = [] if logger is True else _as_list(logger)
                tensorboard = (
                    []
                    if configured(TensorBoardLogger, own)
                    else [TensorBoardLogger(run_dir, "", "")]
                )
                logger = [MetricsCSV(run_dir), *tensorboard, *own]
        else:
            self.save_config_callback = (
                None  # it would write config.yaml into the working directory
            )
            callbacks, logger = [*callbacks, *progress], logger or False
        plugins = [
            *_as_list(trainer.get("plugins")),
            AtomicCheckpointIO(),
        ]  # it reads sharded checkpoints too
        by_slurm = (
            SLURMEnvironment.detect() and not TorchElasticEnvironment.detect()
        )  # torchrun may run in a job
        if by_slurm and not configured(ClusterEnvironment, plugins):
            plugins.append(
                SLURMEnvironment(auto_requeue=False)
            )  # train.sbatch does, after our checkpoint
        made = super().instantiate_trainer(
            callbacks=callbacks, logger=logger, plugins=plugins, **kwargs
        )
        strategy = made.strategy  # which auto chooses by the machine
        check_strategy(
            type(strategy).__name__, type(strategy), {"start_method": start_method(strategy)}
        )
        if isinstance(strategy, DDPStrategy):
            wrap_on_current_stream(strategy)
        return made


def set_rate_by_size(model: Namespace) -> None:
    """Set AdamW's missing rate to that of the model's width, so that every record has it."""
    settings = model.get("init_args", {})
    optimizer = settings.get("optimizer")
    if not isinstance(optimizer, Namespace) or class_name(optimizer.get("class_path")) != "AdamW":
        return
    is_ours = locate(optimizer.class_path) is AdamW
    if is_ours and optimizer.init_args.lr is None and "d_model" in settings:
        optimizer.init_args.lr = rate_of_width(settings.d_model)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def main(arguments: list[str]) -> int:
    """Run a LightningCLI subcommand; `arguments` begins with its name."""
    logging.getLogger("anlit").setLevel(logging.INFO)
    logging.basicConfig(format="%(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    flush_denormals()  # before torch starts its threads
    if "SLURM_JOB_ID" not in os.environ:  # a login node: Lightning's hint is for jobs
        warnings.filterwarnings("ignore", ".*`srun` command is available.*")
    refusals.listen()
    try:
        with lasting_output(), quiet_log_threads():
            read_command(
                FitCommand,
                arguments,
                save_config_callback=SaveConfigOfTraining,
                save_config_kwargs={"overwrite": True},
            )
    except SystemExit as end:  # Lightning exits after an interruption
        if isinstance(end.__context__, Preempted):
            refusals.tell(PREEMPTED)
            return PREEMPTED
        raise
    except Preempted:  # before training, of which other ranks may know nothing
        refusals.tell(PREEMPTED)
        raise
    except Exception as error:
        if (of_machine := run_error(error)) is not None:
            refusals.tell(of_machine.exit_code)
            raise of_machine from error
        refusals.tell(error.exit_code if isinstance(error, UserError) else 1)
        if isinstance(error, UserError):
            run_folder.remove_traces(RUN_FOLDER.get())
        raise
    return 0
