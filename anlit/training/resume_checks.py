"""A run continues, or is evaluated, with settings that differ from its checkpoint's.

Setting                                         On a change
model: shape, heads, attention, positions …     refused; with `accept_changes` the new one is used
optimizer's class                               refused; with `accept_changes` it has no state
seed_everything                                 refused; with `accept_changes` the new one is used
validation, such as data.val_blocks             refused likewise: curves would mix two measures
learning rates, betas, weight decay, schedule,  used from the next step on, and one line is logged
dropout, z_loss, runtime, kernel, Trainer's,
data.batch_size, number of devices

`validate` and `test` refuse the changes of the model that `fit` refuses.

Training writes config.yaml when it starts. So the file has the settings of the continued run. The
data module refuses other texts and another order.
"""

import os
from collections.abc import Iterator
from typing import Any

import lightning as L
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import anlit
from anlit.config.labels import class_name, init_args
from anlit.config.objects import class_path_of, is_plain
from anlit.config.schema import recorded_keys, setting_of
from anlit.errors import UserError
from anlit.training.lightning_internals import data_module_of

N_PROCESSES = "trainer.world_size"
"""The number of processes. It follows from the settings devices, num_nodes and strategy."""


def run_settings(trainer: L.Trainer) -> dict[str, Any]:
    """The settings of a run that a checkpoint records in addition to the model's settings."""
    settings: dict[str, Any] = {"trainer": {"precision": str(trainer.precision)}, "data": {}}
    owners = {"trainer": trainer, "data": data_module_of(trainer)}
    for key in (*recorded_keys(), N_PROCESSES):
        section, name = key.split(".")
        value = getattr(owners[section], name, None)
        # Checkpoints have plain values only, so an enumeration's member becomes its value.
        value = getattr(value, "value", value)
        settings[section][name] = value if is_plain(value) else None  # of a user's own data class
    seed = os.environ.get("PL_GLOBAL_SEED")  # set by seed_everything
    settings["seed_everything"] = int(seed) if seed is not None else None
    return settings


def compare_settings(
    saved: dict[str, Any], current: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the dotted name of each setting that differs, and `name old → new`.

    If a class was replaced, its arguments are not compared.
    """
    new_keys = [key for key in current if key not in saved]
    for key in [*saved, *new_keys]:
        # `_…` are entries of LightningCLI. A key may be a number: a step of data.context_schedule.
        if str(key).startswith("_"):
            continue
        name = f"{prefix}{key}"
        old = _tuples_to_lists(saved.get(key))
        new = _tuples_to_lists(current.get(key))
        if _has_same_class(old, new):
            yield from compare_settings(_arguments(old), _arguments(new), f"{name}.")
        elif old != new:
            yield name, f"{name} {_short_name(old)} → {_short_name(new)}"


def _has_same_class(old: Any, new: Any) -> bool:
    """Whether two values are sections of settings, or configure objects of one class."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return False
    return _full_path(old) == _full_path(new)


def _full_path(section: dict[str, Any]) -> str | None:
    """The path by which an object's class is defined: `anlit.RoPE` is a shorter one of the same."""
    path = section.get("class_path")
    package, _, name = str(path).rpartition(".")
    if package != anlit.__name__:
        return path
    kind = getattr(anlit, name, None)
    return class_path_of(kind) if isinstance(kind, type) else path


def _arguments(section: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an object's configuration; a section of settings itself."""
    return init_args(section) if "class_path" in section else section


def _short_name(value: Any) -> Any:
    """The class's name of an object's configuration; any other value itself."""
    return (class_name(value) or value) if isinstance(value, dict) else value


def refuse_changes(changed: dict[str, str], ckpt_path: Any) -> None:
    """Raise UserError for refused changes; `changed` has dotted name → `name old → new`."""
    refusals = [change for key, change in changed.items() if setting_of(key).fixed]
    if refusals:
        raise UserError(
            f"ckpt_path={ckpt_path} was trained with other settings ({', '.join(refusals)}): set "
            "them back as in the run's config.yaml, or give --accept_changes true to go on with "
            "the new ones"
        )


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """A copy of the settings of each parameter group, without the parameters."""
    settings = [dict(group) for group in optimizer.param_groups]
    for group in settings:
        del group["params"]
    return settings


def apply_group_settings(
    optimizer: Optimizer, scheduler: LambdaLR, configured: list[dict[str, Any]]
) -> None:
    """Replace the settings of the parameter groups that the checkpoint has restored.

    `configured` is the result of `group_settings` for the new optimizer.
    """
    groups = optimizer.param_groups
    for number, (group, settings) in enumerate(zip(groups, configured, strict=True)):
        # The peak rate comes from the configuration, the schedule's step from the checkpoint.
        peak = settings["lr"]
        scheduler.base_lrs[number] = peak
        rate = peak * scheduler.lr_lambdas[number](scheduler.last_epoch)
        group.update(settings | {"initial_lr": peak, "lr": rate})
    # What `get_last_lr` returns until the next step.
    scheduler._last_lr = [group["lr"] for group in groups]


def _tuples_to_lists(value: Any) -> Any:
    """`value` with lists in place of tuples, as a file of plain values has them."""
    if isinstance(value, list | tuple):
        return [_tuples_to_lists(entry) for entry in value]
    return value
