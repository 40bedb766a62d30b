"""Refuses what a parsed configuration may not say, before any object is made: functions, and numbers out of range.

The parser checks that a class has the right type, but it also accepts functions: any function if the key needs a
callable, such as `model.init_args.optimizer`, else functions whose annotation returns the right type. Both would be
called.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pydoc import locate
from typing import Any

from jsonargparse import Namespace
from torch import nn

from anlit.errors import UserError
from anlit.sentences import no_class
from anlit.settings import parameters_of, shown

SIZES = ("context_length", "d_ff", "d_head", "d_model", "n_heads", "n_kv_heads", "n_layers", "vocab_size")
COUNTS = ("checkpoint_every_n_steps", "trainer.accumulate_grad_batches", "trainer.num_nodes")
AMOUNTS = ("gradient_clip_val", "limit_test_batches", "limit_val_batches", "log_every_n_steps")
RANGES: list[tuple[str, Callable[[float], bool], Iterable[str]]] = [
    ("1 or more", lambda x: x >= 1, [*COUNTS, *(f"model.{size}" for size in SIZES)]),
    ("0 or more", lambda x: x >= 0, ["model.optimizer.lr", "model.optimizer.weight_decay", "model.z_loss",
                                     *(f"trainer.{amount}" for amount in AMOUNTS)]),
    ("more than 0", lambda x: x > 0, ["trainer.limit_train_batches", "trainer.val_check_interval"]),
    ("0 to 4294967295", lambda x: 0 <= x < 1 << 32, ["seed_everything"]),
    ("0 or more, or -1 for no limit", lambda x: x >= -1, ["trainer.max_epochs", "trainer.max_steps"]),
    ("1 or more, or -1 for all devices", lambda x: x >= 1 or x == -1, ["trainer.devices"]),
]  # fmt: skip
"""What to give, its condition, and the settings that it is for. What a constructor checks itself is not here."""
RANGE_OF = {key: (holds, words) for words, holds, keys in RANGES for key in keys}


def check(config: Any) -> None:
    """Raises UserError if a configuration names a callable that is not a class, or a number is out of its range."""
    for key, owner, name, value in _settings(config, ""):
        if name == "class_path":
            if not inspect.isclass(locate(value)):
                raise UserError(no_class(key, shown(value)))
        elif callable(value) and not isinstance(value, type | nn.Module) and not _is_default(owner, name, value):
            raise UserError(no_class(key, shown(getattr(value, "__qualname__", value))))
        if isinstance(value, str) and key == "trainer.devices" and re.fullmatch(r"-?\d+", value):
            value = int(value)  # it may be a text such as `0,1`, so the parser leaves `0` a text
        holds, words = RANGE_OF.get(key, (None, ""))
        if holds and isinstance(value, int | float) and not isinstance(value, bool) and not holds(value):
            raise UserError(f"{key}={value} is out of range: give {words}")


def _settings(part: Any, key: str, owner: Any = None) -> Iterator[tuple[str, Any, str, Any]]:
    """Every value below `part`, at any depth: its key with dots and without `init_args` (`model.optimizer.lr`), the
    class that the argument belongs to (None outside of classes), the argument's name, and the value."""
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
        yield below, owner, str(name), value
        yield from _settings(value, below, locate(str(path)) if within else None)


def _is_default(owner: Any, name: str, value: Any) -> bool:
    """Whether the value is the class's default for this argument."""
    known = parameters_of(owner) if inspect.isclass(owner) else []
    return any(parameter.name == name and parameter.default is value for parameter in known)
