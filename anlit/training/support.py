"""Which strategies, callbacks, plugins and settings of Lightning's Trainer a run may have.

A run keeps four promises. It continues to the bit. A signal ends it in order. Every checkpoint
holds whole optimizer steps. Its losses do not depend on the number of processes. A setting that
breaks a promise is refused. docs/scale-out.md has the tables.

In the tables a reason follows the setting in the error: cause, then fix.
"""

import inspect
from collections.abc import Iterator, Mapping
from pydoc import locate
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import callbacks
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
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

from anlit.config.batch_ramp import configured_ramp
from anlit.config.labels import class_name, init_args, mapping
from anlit.errors import UserError
from anlit.training.callbacks.loss_guard import LossGuard
from anlit.training.callbacks.noise_scale import GradientNoiseScale
from anlit.training.strategies import FullySharded
from anlit.training.weight_averages import refuse_late_start, refuse_two_averages

SHARDED_FIX = "set --trainer.strategy anlit.FullySharded"
ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
STRATEGIES: list[tuple[Any, str | None]] = [
    (FullySharded, None),
    (
        ModelParallelStrategy,
        f"does not shard anlit's models and would average no gradients: {SHARDED_FIX}",
    ),
    (FSDPStrategy, f"flattens the weights, whose rows anlit keeps at a norm: {SHARDED_FIX}"),
    (
        DeepSpeedStrategy,
        f"has checkpoints of its own, from which no run could continue: {SHARDED_FIX}",
    ),
    (
        (XLAStrategy, SingleDeviceXLAStrategy),
        "needs a TPU, on which anlit was never tried: set auto on CPU or GPU",
    ),
    (DDPStrategy, None),
    (SingleDeviceStrategy, None),
    (
        Strategy,
        "was never tried: derive it from DDPStrategy, SingleDeviceStrategy or anlit.FullySharded",
    ),
]
"""Classes, and the reason why they and their subclasses are refused; None: they are accepted.

The first entry that fits decides.
"""

EXCHANGE = "changes what ranks exchange, and no checkpoint has its state: leave it out"
DDP_ARGUMENTS = {
    "ddp_comm_hook": EXCHANGE,
    "ddp_comm_state": EXCHANGE,
    "ddp_comm_wrapper": EXCHANGE,
    "model_averaging_period": EXCHANGE,
    "static_graph": "fails inside torch where micro-batches are accumulated: leave it out",
}
"""Arguments of DDPStrategy that are refused if they are set → reason."""

SAVES_WITHIN_STEP = (
    "would save within a step, of which a continued run loses batches: leave it out, last.ckpt is "
    "written every checkpoint_every_n_steps and at signals"
)
FINDER = "takes steps that are not the run's: anlit study tunes rates, anlit size says what fits"
CALLBACKS: dict[type[callbacks.Callback], str] = {
    callbacks.LearningRateFinder: FINDER,
    callbacks.BatchSizeFinder: FINDER,
    callbacks.GradientAccumulationScheduler: "counts epochs, of which a run has one or a few: give "
    "anlit.training.callbacks.BatchRamp, which counts steps",
    callbacks.BaseFinetuning: "adds weights to the optimizer within a run, which schedule and "
    "checkpoints do not know: leave it out, or start from --initial_weights",
    callbacks.ModelPruning: "puts masks beside the weights, which no checkpoint has: leave it out",
    callbacks.StochasticWeightAveraging: "averages once an epoch, of which a run may have one, and "
    "replaces the schedule: use anlit.training.callbacks.TailAveraging, as trainer/swa.yaml does",
    callbacks.SpikeDetection: "ends the run by an error, after which nobody skips the batches: "
    "use LossGuard",
    callbacks.OnExceptionCheckpoint: SAVES_WITHIN_STEP,
}
"""Callbacks of Lightning that are refused, with their subclasses → reason."""

REFUSED_VALUES: dict[str, tuple[Any, str]] = {
    "barebones": (
        True,
        "turns off checkpoints and logs, so no run is left: leave it out, anlit benchmark step "
        "measures speed",
    ),
    "enable_checkpointing": (
        False,
        "leaves nothing to continue from: leave it out, and set checkpoint_every_n_steps",
    ),
}
"""Arguments of the Trainer → the refused value, and the reason."""
REFUSED_ARGUMENTS = {
    "default_root_dir": "would not be used, because a run writes into its run folder: set "
    "--run_dir {value}",
    "model_registry": "would upload checkpoints to a place that --ckpt_path cannot read: leave it "
    "out",
}
"""Arguments of the Trainer that are refused with any value → reason."""


def check_trainer(trainer: Mapping[str, Any]) -> None:
    """Raise UserError for the first setting in a configuration's `trainer` that no run may have."""
    for name, (refused_value, reason) in REFUSED_VALUES.items():
        if trainer.get(name) is refused_value:
            raise UserError(f"trainer.{name}={str(refused_value).lower()} {reason}")
    for name, reason in REFUSED_ARGUMENTS.items():
        value = trainer.get(name)
        if value is not None:
            raise UserError(f"trainer.{name}={value} {reason.format(value=value)}")
    _check_accelerator(trainer.get("accelerator") or "auto")
    strategy = trainer.get("strategy") or "auto"
    strategy_class = class_of_strategy(strategy)
    if strategy_class is not None:
        name = strategy if isinstance(strategy, str) else class_name(strategy)
        check_strategy(name, strategy_class, _arguments_of_strategy(strategy))
    for plugin, _ in _configured_objects(trainer, "plugins"):
        _check_plugin(plugin)
    configured_ramp(trainer)
    refuse_two_averages(callback for callback, _ in _configured_objects(trainer, "callbacks"))
    for callback, arguments in _configured_objects(trainer, "callbacks"):
        _check_callback(callback, arguments)
        if issubclass(callback, LossGuard):
            LossGuard.check_clipping(trainer.get("gradient_clip_algorithm"))
        if issubclass(callback, callbacks.EMAWeightAveraging):
            _check_moving_average(arguments)


def check_ranks(trainer: Mapping[str, Any], n_ranks: int) -> None:
    """Raise UserError if a configuration's `trainer` needs another number of ranks."""
    strategy = trainer.get("strategy") or "auto"
    strategy_class = class_of_strategy(strategy)
    n_separate_ranks = n_ranks
    if strategy_class is not None and issubclass(strategy_class, FullySharded):
        replicas = _arguments_of_strategy(strategy).get("replicas", 1)
        FullySharded.check_replicas(replicas, n_ranks)
        n_separate_ranks = 1
    n_micro_batches = int(trainer.get("accumulate_grad_batches") or 1) * n_separate_ranks
    for callback, _ in _configured_objects(trainer, "callbacks"):
        if issubclass(callback, GradientNoiseScale):
            GradientNoiseScale.check_micro_batches(n_micro_batches)


def check_steps(trainer: Mapping[str, Any], n_steps: int) -> None:
    """Raise UserError if a callback in a configuration's `trainer` begins after the last step."""
    for callback, arguments in _configured_objects(trainer, "callbacks"):
        if issubclass(callback, callbacks.WeightAveraging):
            refuse_late_start(arguments.get("update_starting_at_step"), n_steps)


def averages_on_device(trainer: Mapping[str, Any]) -> bool:
    """Whether a callback in a configuration's `trainer` averages weights, beside the weights."""
    for callback, arguments in _configured_objects(trainer, "callbacks"):
        if issubclass(callback, callbacks.WeightAveraging):
            return str(arguments.get("device")).partition(":")[0] != "cpu"
    return False


def _check_accelerator(accelerator: Any) -> None:
    """Raise UserError for an accelerator, a name or a class, on which anlit was never tried."""
    name = accelerator if isinstance(accelerator, str) else class_name(accelerator)
    accelerator_class = _class_in(accelerator)
    is_tried = name in ACCELERATORS
    if accelerator_class is not None:
        is_tried = issubclass(accelerator_class, CPUAccelerator | CUDAAccelerator)
    if not is_tried:
        raise UserError(
            f"trainer.accelerator={name} is not one of anlit's, which trains on CPU and CUDA "
            "GPUs: set auto, cpu or gpu"
        )


def check_strategy(name: str, strategy_class: type[Strategy], arguments: Mapping[str, Any]) -> None:
    """Raise UserError if anlit does not train with a strategy of this class and arguments."""
    reasons = (reason for base, reason in STRATEGIES if issubclass(strategy_class, base))
    reason = next(reasons)
    if reason is not None:
        raise UserError(f"trainer.strategy={name} {reason}")
    if arguments.get("start_method", "popen") != "popen":
        raise UserError(
            f"trainer.strategy={name} starts ranks that a signal to the command does not end in "
            "order: set --trainer.strategy ddp"
        )
    for argument, reason in DDP_ARGUMENTS.items():
        if arguments.get(argument):
            raise UserError(f"trainer.strategy.{argument} {reason}")


def class_of_strategy(strategy: Any) -> type[Strategy] | None:
    """The class of a configured strategy, from Lightning's name or a class_path; None for auto.

    Raises UserError for an unknown name.
    """
    if not isinstance(strategy, str):
        return _class_in(strategy)
    if strategy == "auto":
        return None
    if strategy.lower() not in StrategyRegistry:
        raise UserError(
            f"trainer.strategy={strategy} is not known: choose auto, ddp or anlit.FullySharded, or "
            "give the path of a class that can be imported"
        )
    strategy_class: type[Strategy] = StrategyRegistry[strategy.lower()]["strategy"]
    return strategy_class


def names_class_of_strategy(strategy: Any) -> bool:
    """Whether `strategy` is the path or name of a class, and no name of Lightning."""
    return isinstance(strategy, str) and strategy.lower() not in ("auto", *StrategyRegistry)


def _arguments_of_strategy(strategy: Any) -> Mapping[str, Any]:
    """The arguments of a configured strategy; for a name, Lightning's arguments."""
    if isinstance(strategy, str):
        return mapping(StrategyRegistry[strategy.lower()]["init_params"])
    return init_args(strategy)


def _configured_objects(
    trainer: Mapping[str, Any], key: str
) -> Iterator[tuple[type, Mapping[str, Any]]]:
    """Yield class and arguments of each object in a setting, a list or a single object."""
    setting = trainer.get(key) or []
    for entry in setting if isinstance(setting, list) else [setting]:
        entry_class = _class_in(entry)
        if entry_class is not None:
            yield entry_class, init_args(entry)


def _class_in(setting: Any) -> Any:
    """The class in an object's configuration; None for another setting, such as a name."""
    located = locate(str(mapping(setting).get("class_path")))
    return located if inspect.isclass(located) else None


def _check_plugin(plugin: type) -> None:
    if issubclass(plugin, CheckpointIO):
        raise UserError(
            f"trainer.plugins has {plugin.__name__}, which would write checkpoints in place of "
            "anlit: leave it out"
        )


def _check_callback(callback: type, arguments: Mapping[str, Any]) -> None:
    for base, reason in CALLBACKS.items():
        if issubclass(callback, base):
            raise UserError(f"trainer.callbacks has {callback.__name__}, which {reason}")
    if issubclass(callback, callbacks.ModelCheckpoint) and arguments.get("save_on_exception"):
        raise UserError(f"trainer.callbacks.save_on_exception=true {SAVES_WITHIN_STEP}")


def _check_moving_average(arguments: Mapping[str, Any]) -> None:
    """Refuse numbers with which Lightning's EMA would never move, or not average."""
    decay = arguments.get("decay")
    if decay is not None and not 0 < decay < 1:
        raise UserError(
            f"trainer.callbacks.decay={decay} is out of range: give more than 0 and less than 1"
        )
    every_n_steps = arguments.get("update_every_n_steps")
    if every_n_steps is not None and every_n_steps < 1:
        raise UserError(
            f"trainer.callbacks.update_every_n_steps={every_n_steps} is out of range: give 1 or "
            "more"
        )
    if arguments.get("update_starting_at_epoch") is not None:
        raise UserError(
            "trainer.callbacks.update_starting_at_epoch counts epochs, and a run may have one: "
            "set update_starting_at_step"
        )
