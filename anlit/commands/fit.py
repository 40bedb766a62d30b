"""`anlit fit | validate | test | predict`: LightningCLI with anlit's run folder, callbacks and loggers."""

import errno
import inspect
import logging
import os
from argparse import ArgumentError
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

import anlit.attention.mechanisms
import anlit.data.corpora
import anlit.data.mixture
import anlit.evaluation.needle.data
import anlit.models  # noqa: F401  short class names in YAML are those of imported classes
from anlit.checkpoints.checkpoint_io import AtomicCheckpointIO, is_sharded, refuse_address
from anlit.checkpoints.initial_weights import load_initial_weights
from anlit.commands.support.allowed import refuse_functions, restrict_parser
from anlit.commands.support.bounds import check_bounds, make_run_dir, refused_by_lightning
from anlit.commands.support.messages import one_sentence
from anlit.commands.support.quiet import quiet
from anlit.commands.support.run_folder import hold, refuse_damaged_checkpoint, refuse_lost_checkpoint
from anlit.commands.support.trained_model import checkpoint_to_evaluate
from anlit.data import TokenShards
from anlit.data.checks import padded_vocabulary
from anlit.errors import RunError, UserError
from anlit.lightning_internals import CommandLine
from anlit.models.language_model import LanguageModel
from anlit.models.runtime import flush_denormals
from anlit.shipped import with_configuration_files
from anlit.training.callbacks import (
    BestCheckpoint,
    FiniteCheckpoints,
    HyperParameters,
    LastCheckpoint,
    LossGuard,
    MetricsOnResume,
    NormMonitor,
    Predictions,
    RandomState,
    RunProgress,
    RunRecord,
    StopOnNonFinite,
    Throughput,
    WholeSteps,
)
from anlit.training.interruption import TRY_AGAIN, Preempted
from anlit.training.loggers import CSVLogger

SUBCOMMANDS = ("fit", "validate", "test", "predict")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the operating system says where a disk, a quota or the limit of a file's size is used up."""
TRAINER_DEFAULTS = {
    "max_steps": 1000,
    "gradient_clip_val": 1.0,
    "val_check_interval": 100,
    "check_val_every_n_epoch": None,  # val_check_interval counts optimizer steps, across epochs; see WholeSteps
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 10,
    "enable_model_summary": False,  # RunProgress says how many parameters there are
}
PARSED: dict[str, Any] = {
    "model_class": LanguageModel,
    "datamodule_class": TokenShards,
    "subclass_mode_model": True,
    "subclass_mode_data": True,
    "auto_configure_optimizers": False,
    "seed_everything_default": 1,
    "trainer_defaults": TRAINER_DEFAULTS,
}
"""What every LightningCLI that reads a run's configuration is made with."""


class SaveConfigOfTraining(SaveConfigCallback):
    """Writes config.yaml when training begins: a continuation that is refused leaves the run's own there."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Too early."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().setup(trainer, pl_module, "fit")


class AnlitCLI(CommandLine):
    """LightningCLI whose `fit` writes one run folder: config, record, metrics, TensorBoard, checkpoints."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Without the option to unpickle checkpoints: they are always read with weights_only=True."""
        return {name: skipped | {"weights_only"} for name, skipped in LightningCLI.subcommands().items()}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        restrict_parser()
        return super().init_parser(**kwargs)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        refuse_functions(self.config[self.config.subcommand])

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--run_dir", type=str | None, default=None, help="The run folder (default: runs/<model>-seed<seed>)."
        )
        parser.add_argument(
            "--checkpoint_every_n_steps", type=int, default=500, help="Optimizer steps between two last.ckpt."
        )
        parser.add_argument(
            "--initial_weights",
            type=str | None,
            default=None,
            help="A checkpoint whose weights `fit` starts from, with a new optimizer and step 0; with --ckpt_path last "
            "only where the run folder has no last.ckpt yet.",
        )
        parser.add_argument(
            "--accept_changes",
            type=bool,
            default=False,
            help="Let `fit` continue from --ckpt_path with another model, class of optimizer or seed than its "
            "checkpoint's; weights that do not fit are refused all the same.",
        )

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        check_bounds(config)
        given_run_dir = config.run_dir
        if config.run_dir is None:
            config.run_dir = f"runs/{config.model.class_path.rsplit('.', 1)[-1].lower()}-seed{config.seed_everything}"
        if self.subcommand == "predict":
            config.return_predictions = False  # they go into a file; together they may not fit into memory
        if self.subcommand != "fit":
            files = [str(path) for path in config.config or []]
            config.ckpt_path = checkpoint_to_evaluate(config.ckpt_path, given_run_dir, files, str(self.subcommand))
            rank_zero_only(print)(f"{self.subcommand}: {config.ckpt_path}", flush=True)
            return
        make_run_dir(config.run_dir)
        if config.ckpt_path is None:
            _refuse_existing_run(config.run_dir)
        if config.ckpt_path == "last":
            refuse_lost_checkpoint(config.run_dir, config.checkpoint_every_n_steps)
        if config.ckpt_path == "best":
            config.ckpt_path = str(Path(config.run_dir) / "checkpoints" / "best.ckpt")
        if config.ckpt_path not in (None, "last"):
            _require_checkpoint(config.ckpt_path)
        if config.initial_weights is not None and config.ckpt_path not in (None, "last"):
            raise UserError(
                f"initial_weights={config.initial_weights} and ckpt_path={config.ckpt_path} both name weights: give "
                "initial_weights to start a run from them, or ckpt_path to continue one"
            )

    def before_fit(self) -> None:
        path = self.setting("initial_weights")
        run_dir, ckpt_path = self.setting("run_dir"), self.setting("ckpt_path")
        self.model.accept_changes = self.setting("accept_changes")
        if self.trainer.is_global_zero:
            self.held = hold(run_dir)
            if ckpt_path is not None:
                refuse_damaged_checkpoint(run_dir, ckpt_path)
        goes_on = ckpt_path == "last" and (Path(run_dir) / "checkpoints" / "last.ckpt").exists()
        if path is not None and not goes_on:
            load_initial_weights(self.model, path)

    def after_fit(self) -> None:
        if self.trainer.is_global_zero:
            self.held.close()

    def instantiate_classes(self) -> None:
        try:
            self._take_the_datas_vocabulary()
            super().instantiate_classes()
        except ValueError as error:
            origin = _origin(error)
            if isinstance(origin, TypeError):  # a mistake in the code, not in the configuration
                raise
            raise UserError(str(origin)) from error
        except MisconfigurationException as error:
            raise refused_by_lightning(error) from error

    def _take_the_datas_vocabulary(self) -> None:
        """Where the configuration gives no vocab_size: that of the data, which are prepared for it if need be."""
        config = self.config[self.subcommand]
        settings = config.model.get("init_args", {})
        if "vocab_size" not in settings or settings.vocab_size is not None:
            return
        parser = ArgumentParser()  # one of its own: Lightning's would keep the configuration as it is now
        parser.add_subclass_arguments(TokenShards, "data")
        data = parser.instantiate_classes(Namespace(data=config.data)).data
        data.prepare_data()
        settings.vocab_size = padded_vocabulary(data.vocab_size)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """The Trainer with what every run has, beside the callbacks and loggers of the configuration."""
        trainer, run_dir = self.setting("trainer", default={}), self.setting("run_dir")
        if self.subcommand != "fit":
            self.save_config_callback = None  # it would write config.yaml into the working directory
            predictions = [Predictions(run_dir)] if self.subcommand == "predict" else []
            own = _as_list(trainer.get("callbacks"))
            return super().instantiate_trainer(
                callbacks=[*own, *predictions, *_progress(trainer, own)],
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
                HyperParameters(),
                BestCheckpoint(run_dir),
                LastCheckpoint(run_dir, every),
                WholeSteps(),
            ],
            **kwargs,
        )


def _origin(error: BaseException) -> BaseException:
    """The exception that a class's constructor raised, out of those that the parser wrapped around it."""
    while (inner := error.__cause__ or error.__context__) is not None and isinstance(inner, ValueError | TypeError):
        error = inner
    return error


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _progress(trainer: Any, callbacks: list[Any]) -> list[RunProgress]:
    """Our progress line, where the configuration has no other bar and does not turn it off."""
    wanted = trainer.get("enable_progress_bar") is not False
    return [RunProgress()] if wanted and not any(isinstance(one, ProgressBar) for one in callbacks) else []


def _loggers(configured: Any, run_dir: str) -> Any:
    """CSV and TensorBoard in the run folder; the configuration's own loggers replace TensorBoard, False all."""
    if configured is False:
        return False
    own = _as_list(configured) if configured not in (None, True) else [TensorBoardLogger(run_dir, "", "")]
    return [CSVLogger(run_dir), *own]


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
        raise UserError(f"ckpt_path={path} is a folder and no checkpoint: give RUN/checkpoints/last.ckpt, or last")


def _require_yaml(arguments: list[str]) -> None:
    """Refuse a damaged configuration file by name; the parser's own complaint does not say which file it is."""
    following = zip(arguments, [*arguments[1:], ""], strict=True)
    named = [value for flag, value in following if flag in ("-c", "--config")]
    named += [argument.split("=", 1)[1] for argument in arguments if argument.startswith("--config=")]
    for path in filter(os.path.isfile, named):
        try:
            yaml.safe_load(Path(path).read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            problem = " ".join(str(error).split())
            raise UserError(f"the configuration file {path} is no valid YAML ({problem}): mend it there") from error


def main(arguments: list[str]) -> int:
    """Run a LightningCLI subcommand; `arguments` begins with its name."""
    logging.getLogger("anlit").setLevel(logging.INFO)
    logging.basicConfig(format="%(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    flush_denormals()  # before torch starts its threads
    quiet()
    arguments = with_configuration_files(arguments)
    _require_yaml(arguments)
    try:
        AnlitCLI(
            **PARSED,
            save_config_callback=SaveConfigOfTraining,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={key: {"exit_on_error": False} for key in SUBCOMMANDS} | {"exit_on_error": False},
            args=arguments,
        )
    except ArgumentError as error:
        raise UserError(one_sentence(str(error), _known_keys())) from error
    except OSError as error:
        if error.errno not in FULL:
            raise
        what = f"{error.filename or 'the run folder'} could not be written ({error.strerror})"
        raise RunError(f"{what}: make room, then continue with --ckpt_path last") from error
    except SystemExit as end:  # Lightning's answer to an interruption
        if isinstance(end.__context__, Preempted):
            return TRY_AGAIN
        raise
    return 0


def _known_keys() -> list[str]:
    """Every option of `fit` that is not inside a model or data class, and those of the Trainer, dotted."""
    trainer = [f"trainer.{name}" for name in inspect.signature(L.Trainer).parameters]
    own = ["run_dir", "checkpoint_every_n_steps", "initial_weights", "accept_changes"]
    return [*trainer, "model", "data", "config", *own, "ckpt_path", "seed_everything"]
