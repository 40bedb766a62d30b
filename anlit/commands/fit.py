"""`anlit fit | validate | test`: LightningCLI with anlit's run folder, callbacks and loggers."""

import logging
import os
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import IO, Any

import lightning as L
from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_only

from anlit.checkpoints.checkpoint_io import refuse_damaged
from anlit.checkpoints.location import (
    CHECKPOINTS,
    LAST,
    checkpoint_of_run,
    find_checkpoint,
    last_if_run,
)
from anlit.checkpoints.special_tokens import text_folder
from anlit.commands.anneal import branch
from anlit.commands.budget import batch_shape, has_budget, set_steps
from anlit.commands.class_changes import class_change_messages
from anlit.commands.cpu_threads import divide_threads
from anlit.commands.failures import ignore_thread_write_errors, run_error
from anlit.commands.learning_rate import advice_on_default_rate, set_rate_by_width
from anlit.commands.metrics_table import metrics_table
from anlit.commands.parser import (
    ConfigurationParser,
    explain_constructor_errors,
    read_command,
)
from anlit.commands.run_checks import check_machine, check_run
from anlit.commands.trainer_objects import (
    check_trackers,
    evaluation_callbacks,
    trainer_plugins,
    training_callbacks,
    training_loggers,
)
from anlit.commands.wandb_run import finish_wandb_run, with_wandb_run
from anlit.config.labels import CONFIG, class_name, init_args
from anlit.config.lightning_errors import explain_lightning_error, is_lightning_error
from anlit.config.start_folder import data_paths_from_start, message_on_move
from anlit.config.trainer_defaults import TRAINER_DEFAULTS
from anlit.data.attributes import name_of, vocab_size_of
from anlit.data.checks import padded_vocabulary
from anlit.data.module import TokenShards
from anlit.errors import (
    INTERRUPTED,
    PREEMPTED,
    RUN_FOLDER,
    DivergenceError,
    Preempted,
    RunError,
    UserError,
)
from anlit.io.read import read_yaml
from anlit.nn.models.runtime import flush_denormals, without_matrices
from anlit.reporting.table import console
from anlit.reporting.text import echo, lasting_output
from anlit.signals import ENDING_SIGNALS
from anlit.training import run_folder
from anlit.training.callbacks.checkpoints import LastCheckpoint
from anlit.training.callbacks.run_record import RunRecord
from anlit.training.data_workers import prepare_data_workers
from anlit.training.default_folder import default_run_folder
from anlit.training.devices import check_device_type
from anlit.training.initial_weights import load_initial_weights
from anlit.training.language_model import LanguageModel
from anlit.training.lightning_internals import (
    CommandLine,
    callbacks_of_class,
    set_max_steps,
    start_method,
    wrap_on_current_stream,
)
from anlit.training.refusals import refusals
from anlit.training.run_folder import checkpoint_to_continue, checkpoint_to_evaluate
from anlit.training.support import check_strategy


class SaveConfigOfTraining(SaveConfigCallback):
    """Writes config.yaml when training starts, so that a refused continuation does not change it.

    The file has no ckpt_path. So `anlit validate --config RUN/config.yaml` evaluates the best
    checkpoint of a continued run too.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write nothing yet."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.config.ckpt_path = None
        super().setup(trainer, pl_module, "fit")


class FitCommand(ConfigurationParser):
    """LightningCLI whose `fit` writes a run folder: config, record, metrics, checkpoints."""

    lock_file: IO[str] | None = None
    """The locked file in the run folder; None on ranks above 0, and if a run writes nothing."""
    rate_advice: str | None = None
    """Advice if the learning rate is a default."""
    budget_batch: tuple[int, int] | None = None
    """Sequences and tokens of a micro-batch that a budget of tokens counts."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        if self.subcommand == "fit":
            self._prepare_run_folder(config)
        else:
            self._choose_checkpoint_to_evaluate(config)
        _find_data_from_start(config)

    def _choose_checkpoint_to_evaluate(self, config: Namespace) -> None:
        config.ckpt_path = checkpoint_to_evaluate(
            config.ckpt_path, config.run_dir, _config_files(config), str(self.subcommand)
        )
        config.run_dir = config.run_dir or _usual_run_dir(config)
        rank_zero_only(echo)(f"{self.subcommand}: {config.ckpt_path}")

    def _prepare_run_folder(self, config: Namespace) -> None:
        """Make the run folder and find the checkpoint to continue from."""
        for message in class_change_messages(config):
            rank_zero_only(echo)(message)
        branched = branch(config)
        if config.ckpt_path is not None:
            config.ckpt_path = last_if_run(config.ckpt_path)
        if config.run_dir is None:
            self._choose_default_folder(config, branched.folder if branched else None)
        if branched:
            rank_zero_only(echo)(f"{branched.description}, in {config.run_dir}")
        if config.ckpt_path in ("last", "best"):
            run_folder.refuse_moved_run(config.run_dir, _config_files(config))
        if not config.trainer.fast_dev_run:
            run_folder.make_run_folder(config.run_dir)
            RUN_FOLDER.set(config.run_dir)
        config.ckpt_path = checkpoint_to_continue(
            config.run_dir, config.ckpt_path, config.checkpoint_every_n_steps
        )
        names_both = config.initial_weights is not None and config.ckpt_path not in (None, "last")
        if names_both and not branched:  # a branch's configuration is that of a begun run
            both = f"initial_weights={config.initial_weights} and ckpt_path={config.ckpt_path}"
            fix = "give initial_weights to start a run from them, or ckpt_path to continue one"
            raise UserError(f"{both} both name weights: {fix}")

    def _choose_default_folder(self, config: Namespace, folder: str | None) -> None:
        """Set `run_dir` to `folder`, or to the usual one, and perhaps with a number; lock it."""
        folder = folder or _usual_run_dir(config)
        if config.trainer.fast_dev_run:  # writes nothing
            config.run_dir = folder
        else:
            config.run_dir, self.lock_file = default_run_folder(
                folder, config.ckpt_path, config.trainer.num_nodes
            )

    def run(self, subcommand: str) -> None:
        try:
            CommandLine.run(self, subcommand)
        except UserError:
            raise
        except Exception as error:
            self._raise_if_signalled(error)
            if not isinstance(error, RuntimeError | MisconfigurationException):
                raise
            if not is_lightning_error(error):
                raise
            raise UserError(explain_lightning_error(error)) from error
        finally:
            for checkpoint in self._last_checkpoints():
                checkpoint.interruption.restore()

    def _last_checkpoints(self) -> list[LastCheckpoint]:
        """The callback that handles signals in `fit`; none in other subcommands."""
        return callbacks_of_class(self.trainer, LastCheckpoint)

    def _raise_if_signalled(self, error: Exception) -> None:
        """Raise the error of a signal, if a signal came before `error`, which it may have caused.

        A signal to a process group also ends compilers and other foreign processes of the run.
        """
        for callback in self._last_checkpoints():
            if callback.interruption.signal not in ENDING_SIGNALS:
                continue
            if callback.interruption.signal != signal.SIGINT:
                raise Preempted from error
            fix = "continue with --ckpt_path last"
            raise RunError(f"Ctrl-C ended the run before its step was complete: {fix}") from error

    def before_fit(self) -> None:
        self.model.accept_changes = self.setting("accept_changes")
        run_dir = self.setting("run_dir")
        ckpt_path = self.setting("ckpt_path")
        if self.trainer.is_global_zero:
            self._lock_run_folder(run_dir, ckpt_path)
            self._refuse_damaged_checkpoint(run_dir, ckpt_path)
        initial_weights = self.setting("initial_weights")
        self.model.budget_batch = None if self._is_continued() else self.budget_batch
        if self._begins_from_weights():
            load_initial_weights(self.model, initial_weights)
            if self.rate_advice is not None:
                weights = f"initial_weights={initial_weights} are trained"
                rank_zero_only(echo)(f"{weights}, but {self.rate_advice}")
            self.model.text_folder = text_folder(find_checkpoint(initial_weights))
        elif ckpt_path not in (None, "last"):
            self.model.text_folder = text_folder(Path(ckpt_path))

    def _lock_run_folder(self, run_dir: str, ckpt_path: str | None) -> None:
        if self.setting("trainer")["fast_dev_run"]:
            return
        if self.lock_file is None:
            self.lock_file = run_folder.lock_run_folder(run_dir)
        # Another run may have taken the folder between the first check and the lock.
        every_n_steps = self.setting("checkpoint_every_n_steps")
        checkpoint_to_continue(run_dir, ckpt_path, every_n_steps, announce=False)

    def _refuse_damaged_checkpoint(self, run_dir: str, ckpt_path: str | None) -> None:
        if ckpt_path is None:
            return
        path = Path(run_dir) / CHECKPOINTS / LAST if ckpt_path == "last" else Path(ckpt_path)
        if os.path.lexists(path):
            refuse_damaged(path)

    def before_validate(self) -> None:
        self._before_evaluation("limit_val_batches")

    def before_test(self) -> None:
        self._before_evaluation("limit_test_batches")

    def _before_evaluation(self, limit: str) -> None:
        """Raise UserError if the configuration, such as that of a run, leaves no batch."""
        if self.setting("trainer")[limit] == 0:
            raise UserError(f"trainer.{limit}=0 evaluates nothing: give --trainer.{limit} 1.0")
        self.model.accept_changes = self.setting("accept_changes")

    def validate(self, **arguments: Any) -> None:
        """Run `Trainer.validate`, and print its metrics. LightningCLI calls this."""
        self._evaluate(self.trainer.validate, **arguments)

    def test(self, **arguments: Any) -> None:
        """Run `Trainer.test`, and print its metrics. LightningCLI calls this."""
        self._evaluate(self.trainer.test, **arguments)

    def _evaluate(
        self,
        evaluate: Callable[..., Sequence[Mapping[str, float]]],
        verbose: bool,
        **arguments: Any,
    ) -> None:
        # Lightning's own table has 16 digits.
        results = evaluate(verbose=False, **arguments)
        if verbose and self.trainer.is_global_zero:
            console().print(metrics_table(results))

    def after_fit(self) -> None:
        if self.lock_file is not None:
            self.lock_file.close()
        if self.trainer.is_global_zero:
            finish_wandb_run()

    def instantiate_classes(self) -> None:
        """Make the objects of the configuration. Raises UserError if a class refuses a setting.

        The vocabulary may come from data that have to be prepared, for hours. All that can be
        refused is refused before.
        """
        config = self.config[self.subcommand]
        is_fit = self.subcommand == "fit"
        with explain_constructor_errors():
            model = self._check_run(config) if is_fit else None
            check_trackers(config.get("trainer.logger"))
            logged = with_wandb_run(config, config.run_dir) if is_fit else config
            self.make_objects(logged, "trainer")
            self.trainer = self.instantiate_trainer()
            if is_fit:
                check_machine(config, model, self.trainer.strategy.root_device.type)
            _set_vocabulary_from_data(config, self.trainer, is_fit)
            if is_fit and has_budget(config):
                set_steps(config, partial(self._count_parameters, config))
                self.budget_batch = batch_shape(config)
                set_max_steps(self.trainer, config.trainer.max_steps)
            self.rate_advice = advice_on_default_rate(config.model)
            set_rate_by_width(config.model)
            # An evaluated checkpoint has all matrices. Drawing 10⁸ numbers takes a second.
            with nullcontext() if is_fit else without_matrices():
                self.make_objects(config, "model", "data")
        self.model = self.setting("model")
        self.datamodule = self.setting("data")
        # Data with a given vocabulary are prepared when the run starts.
        _check_data(self.datamodule, self.model.context_length, self.trainer, is_fit)

    def _check_run(self, config: Namespace) -> LanguageModel | None:
        """Return the result of `check_run`. Raises UserError also if first weights are missing."""
        if self._begins_from_weights():
            find_checkpoint(config.initial_weights)
        return check_run(self, config)

    def _begins_from_weights(self) -> bool:
        """Whether the run reads `--initial_weights`: it continues from no checkpoint."""
        config = self.config[self.subcommand]
        is_branch = config.ckpt_path not in (None, "last")
        return config.initial_weights is not None and not is_branch and not self._is_continued()

    def _is_continued(self) -> bool:
        """Whether `--ckpt_path last` finds a checkpoint."""
        config = self.config[self.subcommand]
        last = checkpoint_of_run(config.run_dir, (LAST,))
        return config.ckpt_path == "last" and last is not None

    def _count_parameters(self, config: Namespace) -> int:
        return self.model_of(config).model.n_parameters()

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Return a Trainer with the callbacks, loggers and plugins that every run has."""
        settings = self.setting("trainer", default={})
        run_dir = self.setting("run_dir")
        if self.subcommand == "fit":
            every_n_steps = self.setting("checkpoint_every_n_steps")
            kwargs["default_root_dir"] = run_dir
            # For null Lightning takes 1 beside min_steps, and an epoch of a stream has no end.
            kwargs["min_epochs"] = settings["min_epochs"] or 0
            record = RunRecord(run_dir, self.setting("name"), self.setting("tags"))
            kwargs["callbacks"] = training_callbacks(settings, record, every_n_steps)
            kwargs["logger"] = training_loggers(settings, run_dir)
            if has_budget(self.config[self.subcommand]):  # the number of steps follows later
                kwargs["max_steps"] = TRAINER_DEFAULTS["max_steps"]
        else:
            self.save_config_callback = None  # it would write into the working directory
            kwargs["callbacks"] = evaluation_callbacks(settings)
            kwargs["logger"] = settings.get("logger") or False
        trainer = super().instantiate_trainer(plugins=trainer_plugins(settings), **kwargs)
        refusals.join(trainer)
        strategy: Strategy = trainer.strategy  # `auto` takes it by the machine
        check_device_type("--trainer.accelerator", strategy.root_device.type)
        divide_threads(getattr(strategy, "num_processes", 1))
        arguments = {"start_method": start_method(strategy)}
        check_strategy(type(strategy).__name__, type(strategy), arguments)
        if isinstance(strategy, DDPStrategy):
            wrap_on_current_stream(strategy)
        prepare_data_workers(trainer)
        return trainer


def _config_files(config: Namespace) -> list[str]:
    return [str(path) for path in config.config or []]


def _find_data_from_start(config: Namespace) -> None:
    """Make paths of the data absolute that only the folder has in which the run was started.

    The run is the one that is evaluated or continued, with its own config.yaml.
    """
    checkpoint = Path(config.ckpt_path) if config.ckpt_path not in (None, "last") else None
    run = checkpoint.parent.parent if checkpoint is not None else Path(config.run_dir)
    files = [Path(file) for file in _config_files(config)]
    if config.ckpt_path is None or run.resolve() / CONFIG not in [file.resolve() for file in files]:
        return
    recorded = read_yaml(run / CONFIG, dict)
    if config.data.get("init_args.path") == init_args(recorded.get("data")).get("path"):
        moved = message_on_move(run, recorded)
        if moved is not None:
            rank_zero_only(echo)(moved)
    for name, paths in data_paths_from_start(run, recorded).items():
        if config.data.get(f"init_args.{name}") == recorded["data"]["init_args"][name]:
            config.data.init_args[name] = paths
            rank_zero_only(echo)(f"data.{name}={paths}, from the folder where {run} was started")


def _usual_run_dir(config: Namespace) -> str:
    """Return the folder of a run without --run_dir, by its name, else by its model and seed."""
    model = class_name(config.model.class_path).lower()
    return f"runs/{config.name or f'{model}-seed{config.seed_everything}'}"


def _set_vocabulary_from_data(config: Namespace, trainer: L.Trainer, trains: bool) -> None:
    """Set a missing vocab_size to the vocabulary of the data, which are prepared if necessary."""
    settings = config.model.get("init_args", {})
    if "vocab_size" not in settings or settings.vocab_size is not None:
        return
    parser = ArgumentParser()  # Lightning's parser would store the present configuration
    parser.add_subclass_arguments(L.LightningDataModule, "data")
    data = parser.instantiate(Namespace(data=config.data)).data
    if "context_length" in settings:
        _check_data(data, settings.context_length, trainer, trains)
    if isinstance(data, TokenShards):
        data.trainer = trainer
        data.prepare_data()
    vocab_size = vocab_size_of(data)
    if vocab_size is None:
        raise UserError(
            f"{name_of(data)} does not give the size of its vocabulary: set --model.vocab_size, or "
            "give the class an attribute vocab_size"
        )
    settings.vocab_size = padded_vocabulary(vocab_size)


def _check_data(data: Any, model_length: int, trainer: L.Trainer, trains: bool) -> None:
    """Raise UserError for settings that no shards fit, before they are prepared."""
    if isinstance(data, TokenShards):
        data.trainer = trainer
        data.check_settings(model_length, trains)


def main(arguments: list[str]) -> int:
    """Run a subcommand of LightningCLI, with which `arguments` begin, and return the exit code."""
    logging.getLogger("anlit").setLevel(logging.INFO)
    logging.basicConfig(format="%(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    flush_denormals()  # before torch starts its threads
    if "SLURM_JOB_ID" not in os.environ:  # a login node: Lightning's hint is for jobs
        warnings.filterwarnings("ignore", ".*`srun` command is available.*")
    refusals.listen()
    try:
        with lasting_output(), ignore_thread_write_errors():
            read_command(
                FitCommand,
                arguments,
                save_config_callback=SaveConfigOfTraining,
                save_config_kwargs={"overwrite": True},
            )
    except SystemExit as exit_request:  # Lightning exits after an interruption
        if isinstance(exit_request.__context__, Preempted):
            refusals.tell(PREEMPTED)
            return PREEMPTED
        raise
    except (Preempted, KeyboardInterrupt) as error:
        # Before training, while other ranks may not have received the signal.
        exit_code = PREEMPTED if isinstance(error, Preempted) else INTERRUPTED
        if not refusals.tell(exit_code, error):
            return exit_code
        raise
    except Exception as error:
        return _end_with_error(error)
    return 0


def _end_with_error(error: Exception) -> int:
    """Raise an error, or return its exit code if another rank prints it."""
    machine_error = run_error(error)
    raised_error = machine_error or error
    exit_code = raised_error.exit_code if isinstance(raised_error, UserError) else 1
    is_printed = refusals.tell(exit_code, raised_error)
    is_refused = isinstance(raised_error, UserError)
    if is_refused and not isinstance(raised_error, RunError | DivergenceError):
        run_folder.remove_refused_start(RUN_FOLDER.get())
    if not is_printed:
        return exit_code
    if machine_error is not None:
        raise machine_error from error
    raise error
