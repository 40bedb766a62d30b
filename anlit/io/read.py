"""Reads small text files that may be damaged or foreign: JSON and YAML.

Size, depth and the expansion of aliases are limited. The content is checked against a schema:

- a type, or a tuple of types;
- `[schema]` for a list of such values;
- `{key: schema}` for a mapping. It may lack a key or hold null, and may have more keys;
- `{str: schema}` for a mapping with any strings as keys.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from anlit.errors import UserError
from anlit.io.yaml_text import TOO_DEEP, check_size, parse_yaml

LARGEST_BYTES = 2**28


def read_text(path: str | Path) -> str:
    """Return the content of a regular file in UTF-8.

    Raises OSError or ValueError for a pipe, a folder, or a large file.
    """
    return decode(read_bytes(path))


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for a pipe or a folder."""
    if Path(path).exists() and not Path(path).is_file():
        raise OSError(0, "it is not a regular file")
    return Path(path).open("rb")


def read_bytes(path: str | Path) -> bytes:
    with open_file(path) as file:
        content = file.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise ValueError(f"it has more than {LARGEST_BYTES:,} bytes")
    return content


def decode(content: bytes) -> str:
    """Return text in UTF-8. Raise ValueError with the line that is not."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is not text in UTF-8") from error


def read_json(
    path: str | Path, schema: Any = object, advice: str = "repair or remove it", missing: Any = None
) -> Any:
    """Read a JSON file and check it against `schema`.

    Returns `missing`, unless it is None, if there is no file. Raises UserError with the file, the
    reason and `advice` if the file cannot be read or does not fit.
    """
    if missing is not None and not Path(path).exists():
        return missing
    return _read(path, _parse_json, schema, advice)


def read_yaml(path: str | Path, schema: Any = object, advice: str = "correct it there") -> Any:
    """Read a YAML file and check it against `schema`. Errors as in `read_json`."""
    return _read(path, parse_yaml, schema, advice)


def _read(path: str | Path, parse: Callable[[str], Any], schema: Any, advice: str) -> Any:
    try:
        content = parse(read_text(path))
        check_content(content, schema)
        return content
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise read_error(path, error, advice) from error


def _parse_json(text: str) -> Any:
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    check_size(content)
    return content


def check_content(value: Any, schema: Any, name: str = "", complete: bool = False) -> None:
    """Check a value against a schema, see the head of this file.

    With `complete`, no key of the schema may be missing or null, and no list empty. Raises
    ValueError, which names the key, such as `hardware.devices`.
    """
    label = name or "its content"
    _check_type(value, schema, label)
    if isinstance(schema, list):
        if complete and not value:
            raise ValueError(f"{name} is empty")
        for item in value:
            check_content(item, schema[0], f"an entry of {label}", complete)
    if isinstance(schema, dict):
        schema_by_key = schema
        if str in schema:
            _refuse_other_keys(value, name)
            schema_by_key = dict.fromkeys(value, schema[str])
        for key, key_schema in schema_by_key.items():
            key_name = f"{name}.{key}".removeprefix(".")
            if value.get(key) is not None:
                check_content(value[key], key_schema, key_name, complete)
            elif complete:
                raise ValueError(f"{key_name} is missing")


def _check_type(value: Any, schema: Any, label: str) -> None:
    """Raise ValueError if the type of a value does not fit. A boolean is not an integer."""
    types = type(schema) if isinstance(schema, dict | list) else schema
    if not isinstance(types, tuple):
        types = (types,)
    is_allowed_boolean = bool in types or object in types
    if isinstance(value, types) and (is_allowed_boolean or not isinstance(value, bool)):
        return
    if value is None:
        raise ValueError(f"{label} is empty")
    names = " or ".join(kind.__name__ for kind in types)
    raise ValueError(f"{label} is {type(value).__name__} in place of {names}")


def _refuse_other_keys(mapping: dict[Any, Any], name: str) -> None:
    """Raise ValueError for a key that is not a string."""
    for key in mapping:
        if not isinstance(key, str):
            raise ValueError(f"{name} has the key {key!r}, which is not a string: put it in quotes")


def read_error(path: str | Path, error: Exception, advice: str) -> UserError:
    """The sentence for a file that cannot be read: path, reason, advice."""
    reason = error.strerror if isinstance(error, OSError) else None
    if not reason:
        reason = " ".join(str(error).replace('in "<unicode string>", ', "in ").split())
    return UserError(f"{path} cannot be read ({reason}): {advice}")
