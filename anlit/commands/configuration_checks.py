"""Refuses what a configuration may not say, before any object is made."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pydoc import locate
from typing import Any, NamedTuple

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.plugins import Precision as PrecisionPlugin
from torch import nn

from anlit.config.error_messages import class_choices, explain_no_class
from anlit.config.objects import parameters_of, shown
from anlit.config.schema import DEVICES
from anlit.config.trainer_defaults import TRAINER_DEFAULTS
from anlit.config.value_checks import check_precision, check_ranges, refuse_null
from anlit.errors import UserError
from anlit.training.support import check_trainer


class ConfiguredValue(NamedTuple):
    """A value of a configuration, with what the class that takes it says of it."""

    key: str
    """Path with dots and without `init_args`: `model.optimizer.lr`."""
    name: str
    """Last key of the path; also `class_path` or `init_args`, which the path lacks."""
    value: Any
    owner: Any
    """The class or dataclass that takes the value as an argument; None outside of classes."""
    annotation: Any
    """The argument's type, Any if it is unknown."""
    default: Any
    """The argument's default, None if it is unknown."""


def check_configuration(config: Namespace, top_level: Mapping[str, tuple[Any, Any]]) -> None:
    """Check the whole configuration of a subcommand.

    Args:
        config: The parsed configuration.
        top_level: Type and default of the settings that belong to no class.

    Raises:
        UserError: A setting is null and must not be, or names a callable that is not a class. It
            is out of its range, or not for a run's Trainer.
    """
    for setting in walk_settings(config.as_dict()):
        if setting.value is None:
            unknown = (setting.annotation, setting.default)
            _refuse_null(setting, *top_level.get(setting.key, unknown))
        if setting.name == "class_path":
            _check_class_path(setting)
        elif callable(setting.value) and not isinstance(setting.value, type | nn.Module):
            _refuse_function(setting)
        if setting.key == "trainer.precision":
            check_precision(setting.value)
        check_ranges(setting.key, setting.value)
        if setting.key == "trainer.devices":
            _check_devices(setting.value)
    check_trainer(config.trainer.as_dict())


def _check_devices(devices: Any) -> None:
    """Raise UserError if `trainer.devices` is neither auto nor a number nor a list of numbers."""
    text = re.sub(r"[\[\] ]", "", str(devices))  # `0,1` of [0, 1] and "0, 1"
    if re.fullmatch(r"-?\d+", text):
        if not isinstance(devices, list):
            check_ranges("trainer.devices", int(text))  # the parser makes a text of it
    elif text != "auto" and not re.fullmatch(r"\d+(,\d+)*,?", text):
        cause = f"trainer.devices={devices} is not a number of devices"
        raise UserError(f"{cause}: give {DEVICES.text}")


def _refuse_null(setting: ConfiguredValue, annotation: Any, default: Any) -> None:
    is_trainer = setting.key == "trainer"
    choices = "settings below it, or leave it out" if is_trainer else class_choices(setting.name)
    refuse_null(setting.key, annotation, default, choices)


def _check_class_path(setting: ConfiguredValue) -> None:
    named_class = locate(setting.value)
    if not inspect.isclass(named_class):
        raise UserError(explain_no_class(setting.key, shown(setting.value)))
    if issubclass(named_class, PrecisionPlugin):
        name = named_class.__name__
        raise UserError(f"{setting.key}={name} sets the precision: set trainer.precision")


def _refuse_function(setting: ConfiguredValue) -> None:
    """Raise UserError for a function, unless it is the default of its argument.

    The parser takes any function for a key of callables such as `model.init_args.optimizer`. For
    other keys it takes a function with the right return type. It would call both.
    """
    parameters = parameters_of(setting.owner) if inspect.isclass(setting.owner) else []
    for parameter in parameters:
        if parameter.name == setting.name and parameter.default is setting.value:
            return
    name = getattr(setting.value, "__qualname__", setting.value)
    raise UserError(explain_no_class(setting.key, shown(name)))


def walk_settings(
    node: Any, key: str = "", owner: Any = None, defaults: Any = None
) -> Iterator[ConfiguredValue]:
    """Yield each value below `node`, at any depth.

    Args:
        node: A value of the configuration.
        key: The path of `node`.
        owner: The class that takes the values of `node` as arguments.
        defaults: The instance with the default values, if `owner` is a dataclass.
    """
    if isinstance(node, list | tuple):
        for number, item in enumerate(node):
            yield from walk_settings(item, f"{key}.{number}", owner)
    elif isinstance(node, dict):
        class_path = node.get("class_path")
        # Once for all names, because it reads the class's source.
        parameters = parameters_of(owner) if inspect.isclass(owner) else []
        for name, value in node.items():
            if name in ("class_path", "init_args") and isinstance(class_path, str):
                yield ConfiguredValue(key, name, value, owner, Any, None)
                yield from walk_settings(value, key, locate(class_path))
                continue
            path = f"{key}.{name}".lstrip(".")
            annotation, default = _type_and_default(owner, name, parameters, defaults)
            yield ConfiguredValue(path, str(name), value, owner, annotation, default)
            if path == "trainer":
                yield from walk_settings(value, path, L.Trainer)
            elif is_dataclass(annotation):
                yield from walk_settings(value, path, annotation, default)
            else:
                yield from walk_settings(value, path)


def _type_and_default(
    owner: Any, name: str, parameters: Sequence[Any], defaults: Any
) -> tuple[Any, Any]:
    """Return an argument's type and default, (Any, None) if they are unknown."""
    if owner is L.Trainer and name in TRAINER_DEFAULTS and name != "gradient_clip_val":
        default = TRAINER_DEFAULTS[name]
        return type(default), default  # null would bring back Lightning's default
    for parameter in parameters:
        if parameter.name == name:
            return parameter.annotation, getattr(defaults, name, parameter.default)
    return Any, None
