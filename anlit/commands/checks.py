"""Refuses what a parsed configuration may not say, before any object is made: functions, and numbers out of range.

The parser checks that a class has the right type, but it also accepts functions: any function if the key needs a
callable, such as `model.init_args.optimizer`, else functions whose annotation returns the right type. Both would be
called.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from pydoc import locate
from typing import Any, NamedTuple

from jsonargparse import Namespace
from torch import nn

from anlit.errors import UserError
from anlit.sentences import no_class
from anlit.settings import parameters_of, shown

SIZES = ("context_length", "d_ff", "d_head", "d_model", "n_heads", "n_kv_heads", "n_layers", "vocab_size")
RANGES: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
    "1 or more": (
        lambda x: x >= 1,
        (
            "checkpoint_every_n_steps", "trainer.accumulate_grad_batches", "trainer.num_nodes",
            *(f"model.{size}" for size in SIZES),
        ),
    ),
    "0 or more": (
        lambda x: x >= 0,
        (
            "model.optimizer.lr", "model.optimizer.weight_decay", "model.z_loss", "trainer.gradient_clip_val",
            "trainer.limit_test_batches", "trainer.limit_val_batches", "trainer.log_every_n_steps",
        ),
    ),
    "more than 0": (lambda x: x > 0, ("trainer.limit_train_batches", "trainer.val_check_interval")),
    "0 to 4294967295": (lambda x: 0 <= x < 1 << 32, ("seed_everything",)),
    "0 or more, or -1 for no limit": (lambda x: x >= -1, ("trainer.max_epochs", "trainer.max_steps")),
    "1 or more, or -1 for all devices": (lambda x: x >= 1 or x == -1, ("trainer.devices",)),
}  # fmt: skip
"""What to give → its condition, and the settings that it is for. What a constructor checks itself is not here."""
RANGE_OF = {key: (holds, words) for words, (holds, keys) in RANGES.items() for key in keys}


class Setting(NamedTuple):
    """A value in a parsed configuration."""

    key: str
    """With dots, without `init_args`: `model.optimizer.lr`."""
    owner: Any
    """The class that the argument belongs to; None outside of classes."""
    name: str
    """The name of the argument."""
    value: Any


def check(config: Any) -> None:
    """Check the configuration of a subcommand.

    Raises:
        UserError: It names a callable that is not a class, or a number is out of its range.
    """
    for setting in _settings(config, ""):
        key, value = setting.key, setting.value
        if setting.name == "class_path":
            if not inspect.isclass(locate(value)):
                raise UserError(no_class(key, shown(value)))
        elif callable(value) and not isinstance(value, type | nn.Module) and not _is_default(setting):
            raise UserError(no_class(key, shown(getattr(value, "__qualname__", value))))
        if isinstance(value, str) and key == "trainer.devices" and re.fullmatch(r"-?\d+", value):
            value = int(value)  # it may be a text such as `0,1`, so the parser leaves `0` a text
        holds, words = RANGE_OF.get(key, (None, ""))
        if holds and isinstance(value, int | float) and not isinstance(value, bool) and not holds(value):
            raise UserError(f"{key}={value} is out of range: give {words}")


def _settings(part: Any, key: str, owner: Any = None) -> Iterator[Setting]:
    """Every value below `part`, at any depth."""
    if isinstance(part, list | tuple):
        for number, value in enumerate(part):
            yield from _settings(value, f"{key}.{number}", owner)
        return
    if not isinstance(part, Namespace | dict):
        return
    parts = vars(part) if isinstance(part, Namespace) else part
    path = parts.get("class_path")
    for name, value in parts.items():
        within = name in ("class_path", "init_args") and isinstance(path, str)
        below = key if within else f"{key}.{name}".lstrip(".")
        yield Setting(below, owner, str(name), value)
        yield from _settings(value, below, locate(str(path)) if within else None)


def _is_default(setting: Setting) -> bool:
    """Whether the value is the class's default for this argument."""
    known = parameters_of(setting.owner) if inspect.isclass(setting.owner) else []
    return any(parameter.name == setting.name and parameter.default is setting.value for parameter in known)
