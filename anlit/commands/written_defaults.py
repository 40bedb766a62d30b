"""Leaves the defaults of a replaced class out of a file that Lightning wrote.

A run's config.yaml and the output of `--print_config` have every setting of their classes. A later
file or option may name another class, which keeps only settings that someone gave. A setting that
is the replaced class's default counts as not given. So the file gives what the files and options
gave that it was made from.
"""

from pathlib import Path
from pydoc import locate
from typing import Any

from jsonargparse import ArgumentParser

from anlit.commands.arguments import CONFIGURATION_SCHEMA
from anlit.config.labels import class_path, init_args, mapping
from anlit.io.read import read_yaml

HEADER = "# lightning.pytorch=="
"""How the first line of such a file begins."""
SECTIONS = ("model", "data", "trainer")
"""Sections that have classes."""


def read_given_settings(file: str, final_settings: dict[str, Any]) -> dict[str, Any]:
    """Return a file's content, without defaults of classes that `final_settings` replaces.

    If Lightning did not write the file, someone gave all of its settings.
    """
    content = read_yaml(file, CONFIGURATION_SCHEMA)
    if not _is_written_by_lightning(file):
        return content
    result = dict(content)
    for name in SECTIONS:
        if name in content:
            result[name] = _without_replaced(content[name], final_settings.get(name), None)
    return result


def _is_written_by_lightning(file: str) -> bool:
    with Path(file).open(encoding="utf-8") as lines:
        return lines.readline().startswith(HEADER)


def _without_replaced(spec: Any, final_spec: Any, default_spec: Any) -> Any:
    """Return a class, or a mapping that has classes. `default_spec` is the default at its key."""
    if not isinstance(spec, dict):
        return spec
    if not class_path(spec):
        final_values = mapping(final_spec)
        values = {}
        for name, value in spec.items():
            values[name] = _without_replaced(value, final_values.get(name), None)
        return values
    if _names_other_class(spec, final_spec):
        return _given(spec, default_spec) or {"class_path": spec["class_path"]}
    defaults = _defaults(spec, default_spec)
    final_settings = init_args(final_spec)
    settings = {}
    for name, value in init_args(spec).items():
        settings[name] = _without_replaced(value, final_settings.get(name), defaults.get(name))
    return {**spec, "init_args": settings} if settings else spec


def _names_other_class(spec: Any, final_spec: Any) -> bool:
    """Whether a class replaces another. A missing class and null replace none."""
    final_path = class_path(final_spec)
    return bool(final_path) and locate(final_path) is not locate(class_path(spec))


def _given(value: Any, default: Any) -> Any:
    """Return a value without what equals the default; None if nothing is left."""
    if not isinstance(value, dict):
        return None if _as_written(value) == _as_written(default) else value
    if class_path(value):
        defaults = _defaults(value, default)
        settings = _given_settings(init_args(value), defaults)
        if settings:
            return {"class_path": value["class_path"], "init_args": settings}
        is_default = locate(class_path(value)) is locate(class_path(default))
        return None if is_default else {"class_path": value["class_path"]}
    return _given_settings(value, mapping(default)) or None


def _given_settings(settings: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are not their defaults. A null that replaces a default is given."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        if value is None and defaults.get(name) is not None:
            result[name] = None
            continue
        given = _given(value, defaults.get(name))
        if given is not None:
            result[name] = given
    return result


def _defaults(spec: Any, default_spec: Any) -> dict[str, Any]:
    """Return the default settings of a class, as the default of its key has them."""
    kind: Any = locate(class_path(spec))
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "settings", fail_untyped=False)
    defaults = parser.get_defaults().as_dict().get("settings", {})
    if class_path(default_spec) and locate(class_path(default_spec)) is kind:
        defaults |= init_args(default_spec)
    return defaults


def _as_written(value: Any) -> Any:
    """Return a value as YAML has it: a list for a tuple."""
    if isinstance(value, list | tuple):
        return [_as_written(item) for item in value]
    return value
