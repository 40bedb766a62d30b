"""Every private member of Lightning that anlit uses, behind a name that says what it is for.

Lightning promises nothing about them, so pyproject.toml has an upper bound of its version, and
tests/training/test_lightning_internals.py fails where one of them is gone. Nothing else of anlit may use one.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning as L
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer import call
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from anlit.errors import find_cause


def trainer_of(module: L.LightningModule) -> L.Trainer | None:
    """The module's Trainer; `module.trainer` raises where there is none."""
    return module._trainer


def is_made_by_cli(module: L.LightningModule) -> bool:
    """Whether LightningCLI made the module, which then has all of its arguments in `hparams`."""
    return "_instantiator" in module.hparams


def completes_step(trainer: L.Trainer) -> bool:
    """Whether the training batch under way is the last micro-batch of an optimizer step."""
    return not trainer.fit_loop._should_accumulate()


def is_logged(trainer: L.Trainer, step: int) -> bool:
    """Whether loggers are told of optimizer step number `step`, from 1, which the training batch under way completes.

    In other steps, and in all but the last micro-batch of this one, nothing is to wait for the device.
    """
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and step % every == 0 and completes_step(trainer)


def number_logged_steps(trainer: L.Trainer, step: int) -> None:
    """Give what is logged from here on the number `step`."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def logged_metrics(trainer: L.Trainer) -> dict[str, Any]:
    """What the batch under way has logged, as numbers, before loggers get it."""
    return convert_tensors_to_scalars(trainer._logger_connector.metrics["log"])


def collect_log_errors(trainer: L.Trainer, note: Callable[[OSError], None]) -> None:
    """Tell `note` of a logger that cannot write, which would otherwise end the run within a step."""
    connector: Any = trainer._logger_connector
    own = type(connector).log_metrics

    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except Exception as error:  # TensorBoardLogger wraps it
            cause = find_cause(error, OSError)
            if cause is None:
                raise
            note(cause)

    def log_metrics(metrics: dict[str, Any], step: int | None = None) -> None:
        with noted():
            own(connector, metrics, step)

    def finalize_quietly(finalize: Callable[[str], None], status: str) -> None:
        with noted():
            finalize(status)

    connector.log_metrics = log_metrics
    for logger in trainer.loggers:
        logger.finalize = partial(finalize_quietly, logger.finalize)  # type: ignore[method-assign]


def validation_follows(trainer: L.Trainer) -> bool:
    """Whether validation comes after the training batch under way."""
    loop: Any = trainer.fit_loop
    return trainer.enable_validation and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


def set_validation_rule(trainer: L.Trainer, is_due: Callable[[Callable[[], bool]], bool]) -> None:
    """Let `is_due` decide after each training batch whether to validate; it is given Lightning's own rule."""
    loop: Any = trainer.fit_loop.epoch_loop
    own = type(loop)._should_check_val_fx
    loop._should_check_val_fx = lambda data_fetcher: is_due(lambda: own(loop, data_fetcher))


def time_fetches(trainer: L.Trainer, waited: Callable[[float], None]) -> None:
    """Tell `waited` the seconds of each `next(loader)` of training.

    Between the hooks of a batch's end and the next one's start lie also checkpoints, validation and a broadcast.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    own, asked_at = type(loop), 0.0

    def on_before_fetch() -> None:
        nonlocal asked_at
        own._on_before_fetch(loop)
        asked_at = time.perf_counter()

    def on_after_fetch() -> None:
        waited(time.perf_counter() - asked_at)
        own._on_after_fetch(loop)

    loop._on_before_fetch, loop._on_after_fetch = on_before_fetch, on_after_fetch


def before_each_fetch(trainer: L.Trainer, act: Callable[[], None]) -> None:
    """Call `act` before each `next(loader)` of training, where the place in the data changes."""
    loop: Any = trainer.fit_loop.epoch_loop
    earlier = loop._on_before_fetch

    def on_before_fetch() -> None:
        act()
        earlier()

    loop._on_before_fetch = on_before_fetch


def start_method(strategy: Strategy) -> str:
    """How a strategy starts its ranks: `popen` (as commands of their own), `spawn` or `fork`."""
    return strategy._start_method if isinstance(strategy, DDPStrategy) else "popen"


def stop_asking_for_sigterm(trainer: L.Trainer) -> None:
    """Leave out Lightning's question to all ranks before every batch. `Interruption` asks without waiting."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def save_checkpoint_now(callback: ModelCheckpoint, trainer: L.Trainer) -> None:
    """Write the callback's checkpoint, whatever its interval says, unless it has that of this step."""
    if callback._last_global_step_saved != trainer.global_step:
        callback._save_topk_checkpoint(trainer, callback._monitor_candidates(trainer))


def is_save_deferred(callback: ModelCheckpoint) -> bool:
    """Whether the callback's next checkpoint is due at the next validation."""
    return callback._defer_save_until_validation


def defer_save(callback: ModelCheckpoint, deferred: bool) -> None:
    """Let the callback save at the next validation, or no longer do so."""
    callback._defer_save_until_validation = deferred


def configure_model(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Call `module.configure_model` as a Trainer's own loop would, for steps that are taken without one."""
    trainer.strategy._lightning_module = module
    call._call_configure_model(trainer)


def wrap_on_current_stream(strategy: DDPStrategy) -> None:
    """Let DDP make its gradient nodes on the stream that the steps run on.

    Lightning makes them on another one, which only a captured graph needs. So every step would wait for that stream,
    and torch 2.11 and later warn of it.
    """

    def wrap(model: nn.Module) -> DistributedDataParallel:
        device_ids = strategy.determine_ddp_device_ids()
        return DistributedDataParallel(model, device_ids=device_ids, **strategy._ddp_kwargs)

    strategy._setup_model = wrap  # type: ignore[method-assign]


def connect_ranks(strategy: ModelParallelStrategy, make_mesh: Callable[[], DeviceMesh]) -> None:
    """Let the ranks meet, then take the mesh that `make_mesh` makes; Lightning's has tensor parallelism in a node."""
    strategy._setup_distributed()
    strategy._device_mesh = make_mesh()


class CommandLine(LightningCLI):
    """LightningCLI that leaves the configuration as it was given, and whose parts a subclass can use."""

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting of the subcommand under way, as an object where it names a class."""
        return self._get(self.config_init, key, default)

    def parser_of(self, subcommand: str) -> LightningArgumentParser:
        """The parser of one subcommand."""
        return self._parser(subcommand)

    def run(self, subcommand: str) -> None:
        """Do what the subcommand says, once everything is made."""
        super()._run_subcommand(subcommand)

    def _run_subcommand(self, subcommand: str) -> None:
        self.run(subcommand)

    def _parse_ckpt_path(self) -> None:
        """Do not take settings from the checkpoint; `LanguageModel.on_load_checkpoint` checks that it fits them."""
