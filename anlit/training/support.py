"""What of Lightning's Trainer a run may have, and why not the rest: strategies, callbacks, plugins and settings.

A run keeps four promises: it continues to the bit, a signal ends it in order, every checkpoint holds whole optimizer
steps, and its losses are those of one process. What breaks one of them is refused. docs/scale-out.md has the tables.
"""

import inspect
from collections.abc import Iterator, Mapping
from pydoc import locate
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    Strategy,
    StrategyRegistry,
    XLAStrategy,
)

from anlit.config.labels import class_name, init_args, mapping
from anlit.errors import UserError
from anlit.training.models import NGPT, AnGPT
from anlit.training.strategies import FullySharded

SHARDED_FIX = "set --trainer.strategy anlit.FullySharded"
STRATEGIES: list[tuple[Any, str]] = [
    (FullySharded, ""),
    (ModelParallelStrategy, "does not shard anlit's models and would average no gradients: " + SHARDED_FIX),
    (FSDPStrategy, "flattens the weights, whose rows anlit keeps at a norm: " + SHARDED_FIX),
    (DeepSpeedStrategy, "has checkpoints of its own, from which no run could continue: " + SHARDED_FIX),
    (XLAStrategy, "needs a TPU, on which anlit was never tried: set ddp on CPU or GPU"),
    (SingleDeviceXLAStrategy, "needs a TPU, on which anlit was never tried: set auto on CPU or GPU"),
    (DDPStrategy, ""),
    (SingleDeviceStrategy, ""),
    (Strategy, "was never tried: derive it from DDPStrategy, SingleDeviceStrategy or anlit.FullySharded"),
]  # fmt: skip
"""A class and why it and its subclasses are refused; "": they are taken. The first class that fits decides."""
EXCHANGE = "changes what ranks exchange, and no checkpoint has its state: leave it out"
DDP_ARGUMENTS = {
    "ddp_comm_hook": EXCHANGE,
    "ddp_comm_state": EXCHANGE,
    "ddp_comm_wrapper": EXCHANGE,
    "model_averaging_period": EXCHANGE,
    "static_graph": "fails inside torch where micro-batches are accumulated: leave it out",
}
"""Arguments of DDPStrategy that are refused if they are set, and why."""

WITHIN_STEP = (
    "would save within a step, of which a continued run loses batches: leave it out, last.ckpt is written every "
    "checkpoint_every_n_steps and at signals"
)
FINDER = "takes steps that are not the run's: anlit study tunes rates, anlit size says what fits"
CALLBACKS: dict[type[callbacks.Callback], str] = {
    callbacks.LearningRateFinder: FINDER,
    callbacks.BatchSizeFinder: FINDER,
    callbacks.GradientAccumulationScheduler: "changes the size of a step, in which validation, checkpoints and the "
    "schedule count: set trainer.accumulate_grad_batches for the whole run",
    callbacks.BaseFinetuning: "adds weights to the optimizer within a run, which schedule and checkpoints do not know: "
    "leave it out, or start from --initial_weights",
    callbacks.ModelPruning: "puts masks beside the weights, which no checkpoint has: leave it out",
    callbacks.StochasticWeightAveraging: "replaces the schedule, and no checkpoint has its mean: "
    "use EMAWeightAveraging",
    callbacks.SpikeDetection: "ends the run by an error, after which nobody skips the batches: use LossGuard",
    callbacks.OnExceptionCheckpoint: WITHIN_STEP,
}
"""Callbacks of Lightning that are refused, with their subclasses, and why."""
BOUNDED = (NGPT, AnGPT)

SETTINGS: dict[str, tuple[Any, str]] = {
    "barebones": (True, "turns off checkpoints and logs, so no run is left: leave it out, anlit benchmark step "
                        "measures speed"),
    "enable_checkpointing": (False, "leaves nothing to continue from: leave it out, and set checkpoint_every_n_steps"),
}  # fmt: skip
"""The Trainer's arguments of which one value is refused: that value, and why."""
UNUSED = {
    "default_root_dir": "would not be used, because a run writes into its run folder: set --run_dir {value}",
    "model_registry": "would upload checkpoints to a place that --ckpt_path cannot read: leave it out",
}
"""The Trainer's arguments that are refused whenever they are set."""


def check_trainer(trainer: Mapping[str, Any], model: Any) -> None:
    """Raise UserError for the first setting of the configuration's `trainer` that a run may not have.

    `model` is the configuration's, by whose class some callbacks are refused.
    """
    for name, (refused, reason) in SETTINGS.items():
        if trainer.get(name) is refused:
            raise UserError(f"trainer.{name}={str(refused).lower()} {reason}")
    for name, reason in UNUSED.items():
        if (value := trainer.get(name)) is not None:
            raise UserError(f"trainer.{name}={value} {reason.format(value=value)}")
    strategy = trainer.get("strategy") or "auto"
    kind = class_of_strategy(strategy)
    if kind is not None:
        check_strategy(_shown(strategy), kind, _settings_of(strategy))
    for plugin, _ in _parts(trainer, "plugins"):
        _check_plugin(plugin)
    for callback, settings in _parts(trainer, "callbacks"):
        _check_callback(callback, settings, _class(model) or object, kind)


def check_strategy(name: str, kind: type[Strategy], settings: Mapping[str, Any]) -> None:
    """Raise UserError if anlit does not train with a strategy of this class and these arguments."""
    reason = next(reason for base, reason in STRATEGIES if issubclass(kind, base))
    if reason:
        raise UserError(f"trainer.strategy={name} {reason}")
    if settings.get("start_method", "popen") != "popen":
        raise UserError(
            f"trainer.strategy={name} starts ranks that a signal to the command does not end in order: "
            "set --trainer.strategy ddp"
        )
    for argument, reason in DDP_ARGUMENTS.items():
        if settings.get(argument):
            raise UserError(f"trainer.strategy.{argument} {reason}")


def class_of_strategy(strategy: Any) -> type[Strategy] | None:
    """The class of a configured strategy, which is a name of Lightning's or has a class_path; None for auto.

    Raises UserError for a name that is not one of them.
    """
    if not isinstance(strategy, str):
        return _class(strategy)
    if strategy == "auto":
        return None
    if strategy.lower() not in StrategyRegistry:
        raise UserError(
            f"trainer.strategy={strategy} is not known: choose auto, ddp or anlit.FullySharded, or give the path of a "
            "class that can be imported"
        )
    kind: type[Strategy] = StrategyRegistry[strategy.lower()]["strategy"]
    return kind


def names_class_of_strategy(strategy: Any) -> bool:
    """Whether `strategy` is the path or name of a class in place of a name of Lightning's."""
    return isinstance(strategy, str) and strategy.lower() not in ("auto", *StrategyRegistry)


def _settings_of(strategy: Any) -> Mapping[str, Any]:
    """The arguments of a configured strategy; of a name those that Lightning has for it."""
    if isinstance(strategy, str):
        return mapping(StrategyRegistry[strategy.lower()]["init_params"])
    return init_args(strategy)


def _shown(strategy: Any) -> str:
    return strategy if isinstance(strategy, str) else class_name(strategy)


def _parts(trainer: Mapping[str, Any], name: str) -> Iterator[tuple[type, Mapping[str, Any]]]:
    """Class and arguments of each object of a list, or of the only one, in the Trainer's configuration."""
    parts = trainer.get(name) or []
    for part in parts if isinstance(parts, list) else [parts]:
        kind = _class(part)
        if kind is not None:
            yield kind, init_args(part)


def _class(spec: Any) -> Any:
    """The class that `spec` names by its class_path; None without one, or if it is a name such as a plugin's."""
    kind = locate(str(mapping(spec).get("class_path")))
    return kind if inspect.isclass(kind) else None


def _check_plugin(plugin: type) -> None:
    if issubclass(plugin, CheckpointIO):
        raise UserError(
            f"trainer.plugins has {plugin.__name__}, which would write checkpoints in place of anlit: leave it out"
        )


def _check_callback(
    callback: type, settings: Mapping[str, Any], model: type, strategy: type[Strategy] | None
) -> None:
    has = f"trainer.callbacks has {callback.__name__}, which"
    for base, reason in CALLBACKS.items():
        if issubclass(callback, base):
            raise UserError(f"{has} {reason}")
    if issubclass(callback, callbacks.ModelCheckpoint) and settings.get("save_on_exception"):
        raise UserError(f"trainer.callbacks.save_on_exception=true {WITHIN_STEP}")
    if issubclass(callback, callbacks.WeightAveraging):
        if issubclass(model, BOUNDED):
            raise UserError(
                f"{has} would make weight rows of {model.__name__} shorter than their norm: leave it out, or train GPT"
            )
        if strategy is not None and issubclass(strategy, FullySharded):
            raise UserError(f"{has} cannot average sharded weights: set --trainer.strategy ddp")
