"""`anlit fit | validate | test`: LightningCLI with anlit's run folder, callbacks and loggers."""

import errno
import logging
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from anlit.checkpoints.checkpoint_io import AtomicCheckpointIO, refuse_damaged
from anlit.checkpoints.initial_weights import load_initial_weights
from anlit.checkpoints.location import (
    BEST,
    CHECKPOINTS,
    LAST,
    checkpoint_of_run,
    is_sharded,
    refuse_address,
    refuse_links,
)
from anlit.commands.support.bounds import make_run_dir, refused_by_lightning
from anlit.commands.support.parser import RunParser, origin, read_command
from anlit.commands.support.quiet import quiet
from anlit.commands.support.run_folder import hold, refuse_lost_checkpoint
from anlit.commands.support.trained_model import checkpoint_to_evaluate
from anlit.commands.support.wandb_run import finish_wandb_run, wandb_run
from anlit.data.checks import padded_vocabulary
from anlit.data.module import TokenShards
from anlit.errors import RUN_FOLDER, RunError, UserError
from anlit.lightning_internals import CommandLine
from anlit.models.runtime import flush_denormals
from anlit.reporting.text import echo
from anlit.training.callbacks.checkpoints import BestCheckpoint, LastCheckpoint
from anlit.training.callbacks.finite import FiniteCheckpoints, StopOnNonFinite
from anlit.training.callbacks.loss_guard import LossGuard
from anlit.training.callbacks.metrics_on_resume import MetricsOnResume
from anlit.training.callbacks.norms import NormMonitor
from anlit.training.callbacks.progress import RunProgress
from anlit.training.callbacks.random_state import RandomState
from anlit.training.callbacks.run_record import RunRecord
from anlit.training.callbacks.throughput import Throughput
from anlit.training.callbacks.whole_steps import WholeSteps
from anlit.training.interruption import TRY_AGAIN, Preempted
from anlit.training.loggers import CSVLogger
from anlit.training.refusals import StopListening, refusals

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the operating system says where a disk, a quota or the limit of a file's size is used up."""


class SaveConfigOfTraining(SaveConfigCallback):
    """Writes config.yaml when training starts, so that a refused continuation does not change it.

    It has no ckpt_path, so `anlit validate --config RUN/config.yaml` evaluates a continued run's best checkpoint too.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write nothing yet."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.config.ckpt_path = None
        super().setup(trainer, pl_module, "fit")


class AnlitCLI(RunParser):
    """LightningCLI whose `fit` writes one run folder: config, record, metrics, TensorBoard, checkpoints."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        run_dir_option = config.run_dir
        if config.run_dir is None:
            config.run_dir = f"runs/{config.model.class_path.rsplit('.', 1)[-1].lower()}-seed{config.seed_everything}"
        if self.subcommand != "fit":
            files = [str(path) for path in config.config or []]
            config.ckpt_path = checkpoint_to_evaluate(config.ckpt_path, run_dir_option, files, str(self.subcommand))
            rank_zero_only(echo)(f"{self.subcommand}: {config.ckpt_path}")
            return
        make_run_dir(config.run_dir)
        RUN_FOLDER.set(config.run_dir)
        refuse_links(Path(config.run_dir))
        if config.ckpt_path is None:
            _refuse_existing_run(config.run_dir)
        if config.ckpt_path == "last":
            refuse_lost_checkpoint(config.run_dir, config.checkpoint_every_n_steps)
        if config.ckpt_path == "best":
            config.ckpt_path = str(Path(config.run_dir) / CHECKPOINTS / BEST)
        if config.ckpt_path not in (None, "last"):
            _require_checkpoint(config.ckpt_path)
        if config.initial_weights is not None and config.ckpt_path not in (None, "last"):
            raise UserError(
                f"initial_weights={config.initial_weights} and ckpt_path={config.ckpt_path} both name weights: give "
                "initial_weights to start a run from them, or ckpt_path to continue one"
            )

    def run(self, subcommand: str) -> None:
        CommandLine.run(self, subcommand)

    def before_fit(self) -> None:
        initial_weights = self.setting("initial_weights")
        run_dir, ckpt_path = self.setting("run_dir"), self.setting("ckpt_path")
        self.model.accept_changes = self.setting("accept_changes")
        if self.trainer.is_global_zero:
            self.held = hold(run_dir)
            path = Path(run_dir) / CHECKPOINTS / LAST if ckpt_path == "last" else Path(ckpt_path or "")
            if ckpt_path is not None and os.path.lexists(path):
                refuse_damaged(path)
        continues = ckpt_path == "last" and checkpoint_of_run(run_dir, (LAST,)) is not None
        if initial_weights is not None and not continues:
            load_initial_weights(self.model, initial_weights)

    def after_fit(self) -> None:
        if self.trainer.is_global_zero:
            self.held.close()
            finish_wandb_run()

    def instantiate_classes(self) -> None:
        try:
            self._set_vocabulary_from_data()
            config = self.config[self.subcommand]
            with wandb_run(config, config.run_dir) if self.subcommand == "fit" else nullcontext():
                LightningCLI.instantiate_classes(self)
        except ValueError as error:
            culprit = origin(error)
            if isinstance(culprit, TypeError):  # a mistake in the code, not in the configuration
                raise
            raise UserError(str(culprit)) from error
        except (MisconfigurationException, TypeError) as error:
            if isinstance(error, TypeError) and "CPUAccelerator" not in str(error):  # a mistake in the code
                raise
            raise refused_by_lightning(error) from error

    def _set_vocabulary_from_data(self) -> None:
        """Set a missing vocab_size to that of the data, which is prepared first if necessary."""
        config = self.config[self.subcommand]
        settings = config.model.get("init_args", {})
        if "vocab_size" not in settings or settings.vocab_size is not None:
            return
        parser = ArgumentParser()  # a new parser, because Lightning's would store the present configuration
        parser.add_subclass_arguments(TokenShards, "data")
        data = parser.instantiate(Namespace(data=config.data)).data
        data.prepare_data()
        settings.vocab_size = padded_vocabulary(data.vocab_size)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Add the callbacks, loggers and plugins that every run has to those of the configuration."""
        trainer, run_dir = self.setting("trainer", default={}), self.setting("run_dir")
        if self.subcommand != "fit":
            self.save_config_callback = None  # it would write config.yaml into the working directory
            own = _as_list(trainer.get("callbacks"))
            return super().instantiate_trainer(
                callbacks=[*own, *_progress(trainer, own)],
                logger=trainer.get("logger") or False,
                plugins=[*_as_list(trainer.get("plugins")), AtomicCheckpointIO()],  # reads sharded checkpoints too
                **kwargs,
            )
        every = self.setting("checkpoint_every_n_steps")
        own = _as_list(trainer.get("callbacks"))
        guarded = any(isinstance(callback, LossGuard) for callback in own)
        return super().instantiate_trainer(
            default_root_dir=run_dir,
            logger=_loggers(trainer.get("logger"), run_dir),
            plugins=[*_as_list(trainer.get("plugins")), AtomicCheckpointIO()],
            callbacks=[
                *own,
                *([] if guarded else [StopOnNonFinite()]),
                FiniteCheckpoints(),
                Throughput(),
                *_progress(trainer, own),
                NormMonitor(),
                RandomState(),
                MetricsOnResume(),
                RunRecord(run_dir),
                BestCheckpoint(run_dir),
                LastCheckpoint(run_dir, every),
                WholeSteps(),
                StopListening(),
            ],
            **kwargs,
        )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _progress(trainer: Any, callbacks: list[Any]) -> list[RunProgress]:
    """Our progress line, unless the configuration has another one or turns it off."""
    wanted = trainer.get("enable_progress_bar") is not False
    return [RunProgress()] if wanted and not any(isinstance(one, ProgressBar) for one in callbacks) else []


def _loggers(configured: Any, run_dir: str) -> Any:
    """CSV and TensorBoard in the run folder, in addition to those configured; False turns all off."""
    if configured is False:
        return False
    own = [] if configured is True else _as_list(configured)
    has_tensorboard = any(isinstance(one, TensorBoardLogger) for one in own)
    return [CSVLogger(run_dir), *([] if has_tensorboard else [TensorBoardLogger(run_dir, "", "")]), *own]


@rank_zero_only
def _refuse_existing_run(run_dir: str) -> None:
    if (Path(run_dir) / "run.json").is_file():
        raise UserError(
            f"run_dir={run_dir} already holds a run: continue it with --ckpt_path last, or choose another --run_dir"
        )


def _require_checkpoint(path: str) -> None:
    refuse_address(path)
    if not Path(path).exists():
        raise UserError(f"ckpt_path={path} does not exist: give a file such as RUN/checkpoints/last.ckpt, or last")
    if Path(path).is_dir() and not is_sharded(path):
        raise UserError(f"ckpt_path={path} is a folder but not a checkpoint: give RUN/checkpoints/last.ckpt, or last")


def main(arguments: list[str]) -> int:
    """Run a LightningCLI subcommand; `arguments` begins with its name."""
    logging.getLogger("anlit").setLevel(logging.INFO)
    logging.basicConfig(format="%(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    flush_denormals()  # before torch starts its threads
    quiet()
    refusals.listen()
    try:
        read_command(
            AnlitCLI, arguments, save_config_callback=SaveConfigOfTraining, save_config_kwargs={"overwrite": True}
        )
    except OSError as error:
        if error.errno not in FULL:
            raise
        what = f"{error.filename or 'the run folder'} could not be written ({error.strerror})"
        raise RunError(f"{what}: make room, then continue with --ckpt_path last") from error
    except SystemExit as end:  # Lightning exits after an interruption
        if isinstance(end.__context__, Preempted):
            return TRY_AGAIN
        raise
    except Exception as error:
        refusals.tell(error.exit_code if isinstance(error, UserError) else 1)
        raise
    return 0
