"""Makes jsonargparse read values by the loader of anlit's YAML files.

Values in options, configuration files and the files that these name are read alike. The rules of
jsonargparse for booleans, numbers and null differ. `use_one_loader` replaces them.
"""

from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import (
    ArgumentParser,
    Namespace,
    _actions,
    _typehints,
    _util,
    set_dumper,
    set_loader,
    set_parsing_settings,
)

from anlit.commands.written_defaults import read_given_settings
from anlit.config.labels import CONFIG, mapping
from anlit.config.options import expand_home
from anlit.errors import UserError
from anlit.io.read import read_yaml
from anlit.io.yaml_text import dump_yaml, parse_scalar, parse_yaml
from anlit.runs.folders import RECORD

FIXES_OF_EMPTY_KEYS = {
    "class_path": "give the name of a class, or leave it out",
    "init_args": "give settings of the class, or leave it out",
}
"""Keys that are never null, and the fix."""
_replaced_contents: ContextVar[dict[str, Any] | None] = ContextVar(
    "replaced_contents", default=None
)
"""The path of a file → the content that is read in its place."""
_evaluates: ContextVar[bool] = ContextVar("evaluates", default=False)
"""Whether the command evaluates a run."""


def use_one_loader() -> None:
    """Let jsonargparse read values as anlit does.

    It then allows all classes, makes no objects for keys of type Any, and reads no `s3://…`.
    """
    set_loader("yaml", load_value, exceptions=(yaml.YAMLError,))
    set_dumper("yaml", dump_yaml)
    _typehints.basic_json_or_yaml_load = parse_scalar
    _typehints.parse_value_or_config = _parse_with_null
    set_parsing_settings(
        import_path_denylist=[],
        instantiate_subclass_spec_in_any=False,
        config_read_mode_fsspec_enabled=False,
    )


def parse_given_settings(parser: ArgumentParser, arguments: list[str]) -> Namespace:
    """Parse files and options, in which a later class keeps only settings that they give.

    If a later file or option names another class, jsonargparse keeps the settings of the same name.
    It keeps defaults of the earlier class too, which nobody wrote. So the first pass is without
    defaults, and the second adds the defaults of the final classes.

    A file that Lightning wrote has defaults of the earlier class too. If a class is replaced, the
    files are read again without them.

    A class may be a file, as in `--model.optimizer FILE`. jsonargparse notes the path among its
    settings, as metadata; the configuration is without it.
    """
    _evaluates.set(arguments[0] != "fit")
    given = _parse_without_defaults(parser, arguments)
    contents = _contents_without_replaced_defaults(given)
    if contents:
        reset = _replaced_contents.set(contents)
        try:
            given = _parse_without_defaults(parser, arguments)
        finally:
            _replaced_contents.reset(reset)
    keep_same_names = _typehints.discard_init_args_on_class_path_change
    _typehints.discard_init_args_on_class_path_change = _discard_settings_of_another_class
    try:
        return parser.parse_object(given.clone(with_meta=False))
    finally:
        _typehints.discard_init_args_on_class_path_change = keep_same_names


def _parse_without_defaults(parser: ArgumentParser, arguments: list[str]) -> Namespace:
    with _actions._ActionPrintConfig.skip_print_config():
        return parser.parse_args(arguments, defaults=False)


def _contents_without_replaced_defaults(given: Namespace) -> dict[str, Any]:
    """Return the new contents of files that Lightning wrote and whose classes are replaced."""
    settings = given[given.subcommand].as_dict()
    contents = {}
    for file in map(str, settings.get("config") or []):
        content = read_given_settings(file, settings)
        if content != read_yaml(file):
            contents[str(Path(file).resolve())] = content
    return contents


def _discard_settings_of_another_class(_: Any, default: Any, value: Any) -> None:
    """Remove the settings of a default, in place, if `value` is of another class."""
    if default and "init_args" in default and default["class_path"] != value["class_path"]:
        default["init_args"] = Namespace()


def load_value(text: str) -> Any:
    """Return the content of a configuration file, or the value of an option.

    Raises YAMLError for a text that is not YAML. Raises UserError for a damaged file, a repeated
    key, or an empty `class_path`.
    """
    file = _file_with_content(text)
    content = _content_of(file) if file else parse_yaml(text)
    if _has_keys_alone(content) and not file and "\n" not in text:
        return text  # `a:` and `{a, b}` are texts in an option
    _refuse_empty_class(content, f"{file}: " if file else "")
    return expand_home(content)


def _content_of(file: str) -> Any:
    """Return the content of a file, or what the second reading puts in its place.

    The loggers in a run's own config.yaml are for its training. An evaluation does not use them.
    """
    contents = _replaced_contents.get() or {}
    content = contents.get(str(Path(file).resolve()))
    if content is None:
        content = read_yaml(file)
    trainer = mapping(mapping(content).get("trainer"))
    if _evaluates.get() and "logger" in trainer and _is_config_of_run(file):
        settings = {name: value for name, value in trainer.items() if name != "logger"}
        return {**content, "trainer": settings}
    return content


def _is_config_of_run(file: str) -> bool:
    path = Path(file)
    return path.name == CONFIG and path.with_name(RECORD).is_file()


def _parse_with_null(value: Any, *arguments: Any, **settings: Any) -> Any:
    """Parse an option's value as jsonargparse does, but keep null in `--model.optimizer.lr=null`.

    jsonargparse hands the value as a text to the parser of the class, where null became `None`.
    """
    parsed, path = _util.parse_value_or_config(value, *arguments, **settings)
    if isinstance(parsed, _util.NestedArg) and parsed.val is None and "." in parsed.key:
        parsed = parsed._replace(val="null")
    return parsed, path


def _file_with_content(text: str) -> str | None:
    """Return the path of the file that jsonargparse reads now, if `text` is its content.

    jsonargparse hands over texts without their origin, and errors have to name the file.
    """
    for path, _ in _util.config_load_stack.get()[-1:]:
        if Path(path).is_file() and Path(path).read_text(encoding="utf-8") == text:
            return path
    return None


def _has_keys_alone(content: Any) -> bool:
    if not isinstance(content, dict) or not content:
        return False
    return all(value is None for value in content.values())


def _refuse_empty_class(content: Any, file_prefix: str, key: str = "") -> None:
    if isinstance(content, list):
        for number, item in enumerate(content):
            _refuse_empty_class(item, file_prefix, f"{key}.{number}".lstrip("."))
    elif isinstance(content, dict):
        for name, item in content.items():
            path = f"{key}.{name}".lstrip(".")
            if item is None and name in FIXES_OF_EMPTY_KEYS:
                raise UserError(f"{file_prefix}{path} is empty: {FIXES_OF_EMPTY_KEYS[name]}")
            _refuse_empty_class(item, file_prefix, path)
