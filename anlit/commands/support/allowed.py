"""Restricts a configuration to classes of the type that the key needs, without functions.

The parser checks that a class has the right type, but it also accepts functions: any function if the key needs a
callable, such as `model.init_args.optimizer`, else functions whose annotation returns the right type. Both would be
called. They are refused here, after parsing and before any object is made.
"""

import inspect
from collections.abc import Iterator
from pydoc import locate
from typing import Any, NamedTuple

from jsonargparse import Namespace, set_parsing_settings
from torch import nn

from anlit.errors import UserError
from anlit.settings import parameters_of, shown


class Setting(NamedTuple):
    """A value in a parsed configuration."""

    key: str
    owner: Any
    """The class that the argument belongs to; None outside of classes."""
    name: str
    """The name of the argument."""
    value: Any


def restrict_parser() -> None:
    """Restrict jsonargparse: refuse dangerous functions on its list, make no objects for keys of type Any, and read the
    files that a configuration names from this machine only. Lightning would read addresses such as `s3://…` too."""
    set_parsing_settings(
        import_path_denylist=[], instantiate_subclass_spec_in_any=False, config_read_mode_fsspec_enabled=False
    )


def refuse_functions(config: Any) -> None:
    """Check a parsed configuration.

    Raises:
        UserError: It names a callable that is not a class.
    """
    for setting in _settings(config, ""):
        if setting.name == "class_path":
            if not inspect.isclass(locate(setting.value)):
                raise _refusal(setting.key, setting.value)
        elif callable(setting.value) and not isinstance(setting.value, type | nn.Module) and not _is_default(setting):
            raise _refusal(setting.key, getattr(setting.value, "__qualname__", setting.value))


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
        below = f"{key}.{name}".lstrip(".")
        yield Setting(below, owner, str(name), value)
        is_of_class = name == "init_args" and isinstance(path, str)
        yield from _settings(value, below, locate(str(path)) if is_of_class else None)


def _is_default(setting: Setting) -> bool:
    """Whether the value is the class's default for this argument."""
    known = parameters_of(setting.owner) if inspect.isclass(setting.owner) else []
    return any(one.name == setting.name and one.default is setting.value for one in known)


def _refusal(key: str, value: Any) -> UserError:
    return UserError(f"{key} names {shown(value)}, which is not a class: give a class of the right type")
