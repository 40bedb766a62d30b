"""How jsonargparse reads values: by the loader that every YAML file of anlit is read with.

A value of a configuration file, of a file that it names, and of an option are read alike. jsonargparse reads booleans
and numbers by rules of its own, which `use_one_loader` replaces, and accepts null for every setting.
"""

import os
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import _typehints, _util, set_dumper, set_loader, set_parsing_settings

from anlit.errors import UserError
from anlit.io.read import dump_yaml, parse_scalar, parse_yaml, read_yaml

NEEDED = {
    "class_path": "give the name of a class, or leave it out",
    "init_args": "give settings of the class, or leave it out",
}
"""Keys that are never null, and the fix."""


def use_one_loader() -> None:
    """Let jsonargparse read values as anlit does, refuse listed functions, make no objects for keys of type Any, and
    read no `s3://…` as a configuration."""
    set_loader("yaml", load_value, exceptions=(yaml.YAMLError,))
    set_dumper("yaml", dump_yaml)
    _typehints.basic_json_or_yaml_load = parse_scalar
    set_parsing_settings(
        import_path_denylist=[],
        instantiate_subclass_spec_in_any=False,
        config_read_mode_fsspec_enabled=False,
    )


def load_value(text: str) -> Any:
    """The content of a configuration file, or the value of an option.

    Raises YAMLError for a text that is no YAML, and UserError for a damaged file, a key that is written twice, or an
    empty `class_path`.
    """
    file = _file_with(text)
    content = read_yaml(file) if file else parse_yaml(text)
    is_words = (
        isinstance(content, dict)
        and content
        and not any(value is not None for value in content.values())
    )
    if is_words and not file and "\n" not in text:  # `a:` and `{a, b}` are options' texts
        return text
    _refuse_empty_class(content, f"{file}: " if file else "")
    return expand_home(content)


def expand_home(value: Any) -> Any:
    """`value` with the home folder in place of ~ in each text that begins with it, at any depth."""
    if isinstance(value, dict):
        return {key: expand_home(part) for key, part in value.items()}
    if isinstance(value, list):
        return [expand_home(part) for part in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


def _file_with(text: str) -> str | None:
    """The path of the file under way, if `text` is its content."""
    for path, _ in _util.config_load_stack.get()[-1:]:
        if Path(path).is_file() and Path(path).read_text(encoding="utf-8") == text:
            return path
    return None


def _refuse_empty_class(content: Any, where: str, key: str = "") -> None:
    if isinstance(content, list):
        for number, part in enumerate(content):
            _refuse_empty_class(part, where, f"{key}.{number}".lstrip("."))
    elif isinstance(content, dict):
        for name, part in content.items():
            path = f"{key}.{name}".lstrip(".")
            if part is None and name in NEEDED:
                raise UserError(f"{where}{path} is empty: {NEEDED[name]}")
            _refuse_empty_class(part, where, path)
