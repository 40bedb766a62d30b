"""Every private or untyped member of Lightning that anlit uses, behind a name of its purpose.

Lightning may change private members, so pyproject.toml bounds its version. If a member is gone,
tests/training/test_lightning_internals.py fails. No other module of anlit may use such a member.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import lightning as L
from jsonargparse import Namespace
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer import call
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from anlit.config.trackers import tracker_error
from anlit.errors import find_cause

T = TypeVar("T")


def trainer_of(module: L.LightningModule) -> L.Trainer | None:
    """The module's Trainer, or None; `module.trainer` raises without a Trainer."""
    return module._trainer


def data_module_of(trainer: L.Trainer | None) -> Any:
    """The Trainer's data module; None without a Trainer, or if loaders deliver the batches."""
    return getattr(trainer, "datamodule", None)


def callbacks_of_class(trainer: L.Trainer, kind: type[T]) -> list[T]:
    """The Trainer's callbacks of a class and its subclasses, in their order."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, kind)]


def is_made_by_cli(module: L.LightningModule) -> bool:
    """Whether LightningCLI made the module, which then has all of its arguments in `hparams`."""
    return "_instantiator" in module.hparams


class HostBatches(L.LightningModule):
    """A module whose `on_host_batch` changes each batch on the host, after the data's own hooks.

    Lightning's public hook belongs to the module or to the data. The data's has precedence.
    """

    def on_host_batch(self, batch: Any) -> Any:
        """Return the batch that moves to the device."""
        return batch

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        return self.on_host_batch(super()._on_before_batch_transfer(batch, dataloader_idx))


def completes_step(trainer: L.Trainer) -> bool:
    """Whether the current training batch is the last micro-batch of an optimizer step."""
    return not trainer.fit_loop._should_accumulate()


def is_logged(trainer: L.Trainer, step: int) -> bool:
    """Whether loggers get step number `step` (from 1), which the current training batch completes.

    Nothing may wait for the device in other steps, nor in earlier micro-batches of this step.
    """
    n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return n_steps > 0 and step % n_steps == 0 and completes_step(trainer)


def number_logged_steps(trainer: L.Trainer, step: int) -> None:
    """Give the number `step` to everything that is logged from this call on."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def logged_metrics(trainer: L.Trainer) -> dict[str, Any]:
    """The numbers that the current batch has logged, before loggers get them."""
    return convert_tensors_to_scalars(trainer._logger_connector.metrics["log"])


def collect_log_errors(trainer: L.Trainer, note: Callable[[Exception], None]) -> None:
    """Call `note` when a logger cannot write, in place of an end within a step."""
    connector: Any = trainer._logger_connector
    log_metrics = partial(type(connector).log_metrics, connector)
    connector.log_metrics = partial(call_noting_errors, note, log_metrics)
    for logger in trainer.loggers:
        finalize = partial(call_noting_errors, note, logger.finalize)
        logger.finalize = finalize  # type: ignore[method-assign]


def call_noting_errors(
    note: Callable[[Exception], None], write: Callable[..., None], *args: Any, **kwargs: Any
) -> None:
    """Call `write`, and tell `note` the OSError that caused its error, or that a tracker fails."""
    try:
        write(*args, **kwargs)
    except Exception as error:  # TensorBoardLogger wraps the OSError
        cause = tracker_error(error) or find_cause(error, OSError)
        if cause is None:
            raise
        note(cause)


def validation_follows(trainer: L.Trainer) -> bool:
    """Whether validation comes after the current training batch."""
    loop: Any = trainer.fit_loop
    return trainer.enable_validation and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


def set_validation_rule(trainer: L.Trainer, is_due: Callable[[Callable[[], bool]], bool]) -> None:
    """Let `is_due` decide after each training batch whether to validate.

    Its argument is Lightning's rule, a function without arguments.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    rule = type(loop)._should_check_val_fx
    loop._should_check_val_fx = lambda data_fetcher: is_due(partial(rule, loop, data_fetcher))


def may_stop_early(trainer: L.Trainer) -> bool:
    """Whether `min_steps` and `min_epochs` let a request stop the run."""
    return trainer.fit_loop._can_stop_early


class FetchTimer:
    """Tells `note` the seconds of each `next(loader)` of training.

    Checkpoints, validation and a broadcast also lie between a batch's end and the next start.
    """

    def __init__(self, trainer: L.Trainer, note: Callable[[float], None]) -> None:
        self.loop: Any = trainer.fit_loop.epoch_loop
        self.note = note
        self.started_at = 0.0

    def install(self) -> None:
        """Replace the hooks of Lightning's loop."""
        loop = self.loop
        loop._on_before_fetch = self.start
        loop._on_after_fetch = self.stop

    def start(self) -> None:
        type(self.loop)._on_before_fetch(self.loop)
        self.started_at = time.perf_counter()

    def stop(self) -> None:
        self.note(time.perf_counter() - self.started_at)
        type(self.loop)._on_after_fetch(self.loop)


def call_before_fetches(trainer: L.Trainer, action: Callable[[], None]) -> None:
    """Call `action` before each `next(loader)` of training, which moves on in the data."""
    loop: Any = trainer.fit_loop.epoch_loop
    on_before_fetch = loop._on_before_fetch

    def act_and_continue() -> None:
        action()
        on_before_fetch()

    loop._on_before_fetch = act_and_continue


def set_max_steps(trainer: L.Trainer, n_steps: int) -> None:
    """Change the number of steps of a Trainer that is made; a `fast_dev_run` keeps its own."""
    if not trainer.fast_dev_run:  # type: ignore[attr-defined]
        trainer.fit_loop.epoch_loop.max_steps = n_steps


def skip_micro_batches(trainer: L.Trainer, n_skipped: int) -> None:
    """Count `n_skipped` micro-batches as taken; call it while a batch begins.

    So the current micro-batch completes its step earlier. No data are skipped.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for counts in (progress.total, progress.current):
        shift_progress(counts, n_skipped)
    fetcher: Any = trainer.fit_loop._data_fetcher
    fetcher.fetched += n_skipped
    if fetcher.length is not None:
        fetcher.done = fetcher.fetched >= fetcher.length
        progress.is_last_batch = fetcher.done


def shift_progress(progress: Any, shift: int) -> None:
    """Add `shift` to all counts of a Lightning progress."""
    for name, count in vars(progress).items():
        setattr(progress, name, count + shift)


def seed_workers(loader: DataLoader, rank: int) -> None:
    """Let a loader seed its worker processes, if the run has a seed and the loader no function.

    Lightning does this after the strategy has seen the loader.
    """
    _auto_add_worker_init_fn(loader, rank)


def start_method(strategy: Strategy) -> str:
    """How a strategy starts its ranks: `popen` (new commands), `spawn` or `fork`."""
    return strategy._start_method if isinstance(strategy, DDPStrategy) else "popen"


def longest_wait(strategy: Strategy) -> timedelta | None:
    """How long a strategy's ranks wait for each other; None for the default of PyTorch."""
    return getattr(strategy, "_timeout", None)


def stop_asking_for_sigterm(trainer: L.Trainer) -> None:
    """Leave out Lightning's broadcast before every batch; `Interruption` has no wait."""
    loop: Any = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = lambda: None


def save_checkpoint_now(callback: ModelCheckpoint, trainer: L.Trainer) -> None:
    """Write the callback's checkpoint at any interval, unless it has saved this step."""
    if callback._last_global_step_saved != trainer.global_step:
        callback._save_topk_checkpoint(trainer, callback._monitor_candidates(trainer))


def is_save_deferred(callback: ModelCheckpoint) -> bool:
    """Whether the callback's next checkpoint is due at the next validation."""
    return callback._defer_save_until_validation


def defer_save(callback: ModelCheckpoint, deferred: bool) -> None:
    """Set whether the callback's next checkpoint is due at the next validation."""
    callback._defer_save_until_validation = deferred


def averaging_device(rule: WeightAveraging) -> Any:
    """The device on which the averages of weights are to be; None for the weights' own."""
    return rule._device


def averaging_functions(rule: WeightAveraging) -> dict[str, Any]:
    """The functions that move averages, by the names of torch: `avg_fn` or `multi_avg_fn`."""
    return rule._kwargs


def configure_model(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Call `module.configure_model` as the Trainer's loop does, for steps without this loop."""
    trainer.strategy._lightning_module = module
    call._call_configure_model(trainer)


def wrap_on_current_stream(strategy: DDPStrategy) -> None:
    """Let DDP make its gradient nodes on the stream that the steps run on.

    Lightning makes them on another stream, which only a captured graph needs. So every step would
    wait for that stream, and torch 2.11 and later warn of it.
    """

    def wrap(model: nn.Module) -> DistributedDataParallel:
        device_ids = strategy.determine_ddp_device_ids()
        return DistributedDataParallel(model, device_ids=device_ids, **strategy._ddp_kwargs)

    strategy._setup_model = wrap  # type: ignore[method-assign]


def connect_ranks(strategy: ModelParallelStrategy, make_mesh: Callable[[], DeviceMesh]) -> None:
    """Connect the ranks, then use the mesh of `make_mesh`.

    Lightning's mesh has tensor parallelism in a node.
    """
    strategy._setup_distributed()
    strategy._device_mesh = make_mesh()


class CommandLine(LightningCLI):
    """LightningCLI that does not change the configuration, with public names for subclasses."""

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting of the current subcommand; an object if the setting names a class."""
        return self._get(self.config_init, key, default)

    def parser_of(self, subcommand: str) -> LightningArgumentParser:
        """The parser of a subcommand."""
        return self._parser(subcommand)

    def make_objects(self, config: Namespace, *sections: str) -> None:
        """Make the objects in some sections of a configuration, for `setting`."""
        subcommand = str(self.subcommand)
        if not hasattr(self, "config_init"):
            self.config_init = self.config.clone()
        # A model keeps its settings from this copy, and an earlier one may lack some.
        vars(self).pop("config_dump", None)
        settings = Namespace({name: config[name] for name in sections})
        made = self.parser.instantiate(Namespace({"subcommand": subcommand, subcommand: settings}))
        for name in sections:
            self.config_init[subcommand][name] = made[subcommand][name]

    def run(self, subcommand: str) -> None:
        """Run the subcommand; model, data and Trainer are made."""
        super()._run_subcommand(subcommand)

    def _run_subcommand(self, subcommand: str) -> None:
        self.run(subcommand)

    def _parse_ckpt_path(self) -> None:
        """Take no settings from the checkpoint; `LanguageModel` compares them when it loads."""
