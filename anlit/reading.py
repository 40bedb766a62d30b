"""Reads small text files that may be damaged or foreign: JSON, YAML and CSV of runs, studies and reports.

Each is read with bounds on its size, its depth and what its aliases expand to, and checked against a schema, so a
reader after it meets no surprise. A schema is a type, a tuple of types, `[schema]` for a list of such values,
`{key: schema}` for a mapping, or `{str: schema}` for one whose keys are any strings; a mapping may lack a key or hold
null, and may have more keys.
"""

import csv
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from anlit.errors import UserError

LARGEST_BYTES = 2**28
DEEPEST = 100
"""Lists and mappings within each other."""
TOO_DEEP = f"it is nested deeper than {DEEPEST} lists and mappings"
MOST_VALUES, LONG_STRING = 1_000_000, 1000
"""Values in a YAML file, each counted as often as an alias repeats it; characters that count as one value."""


def read_text(path: str | Path) -> str:
    """The content of a regular file in UTF-8; raises OSError or ValueError for a pipe, a folder, or a large one."""
    if Path(path).exists() and not Path(path).is_file():
        raise OSError(0, "it is no regular file")
    with Path(path).open("rb") as file:
        content = file.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise ValueError(f"it has more than {LARGEST_BYTES:,} bytes")
    return content.decode()


def read_json(
    path: str | Path, schema: Any = object, advice: str = "repair or remove it", missing: Any = None
) -> Any:
    """The content of a JSON file that is as `schema` says; `missing`, if it is given, where there is no file.

    Raises UserError, which names the file, the reason and `advice`, if it cannot be read or is not so.
    """
    is_absent = missing is not None and not Path(path).exists()
    return missing if is_absent else _read(path, _parse_json, schema, advice)


def read_yaml(path: str | Path, schema: Any = object, advice: str = "correct it there") -> Any:
    """The content of a YAML file, as `read_json`."""
    return _read(path, parse_yaml, schema, advice)


def _read(path: str | Path, parse: Callable[[str], Any], schema: Any, advice: str) -> Any:
    try:
        content = parse(read_text(path))
        check(content, schema)
        return content
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _unreadable(path, error, advice) from error


def read_rows(
    path: str | Path, advice: str = "repair it or leave the run out"
) -> list[dict[str, str]]:
    """The rows of a CSV file by its header, with "" for an empty cell. A last line without an end is left out.

    Raises UserError, which names the file, if it cannot be read, or has other rows than its header says.
    """
    try:
        lines = read_text(path).splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            lines.pop()
        rows = list(csv.DictReader(lines, restkey="", restval="", strict=True))
        if rows and "step" not in rows[0]:
            raise ValueError("its first line names no column 'step'")
        if any("" in row for row in rows):
            raise ValueError("a row has more cells than the first line")
        return rows
    except (OSError, ValueError, csv.Error) as error:
        raise _unreadable(path, error, advice) from error


def number(row: dict[str, str], column: str, path: str | Path) -> float:
    """The number in a cell, NaN for an empty or missing one. Raises UserError if it is none."""
    try:
        return float(row.get(column) or math.nan)
    except ValueError as error:
        said = f"a row has {row[column][:40]!r} as {column}, which is no number"
        raise _unreadable(path, ValueError(said), "repair it or leave the run out") from error


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML 1.1, in which `1e-3` is a number too, as in jsonargparse and YAML 1.2."""


_FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def parse_yaml(text: str) -> Any:
    """The content of YAML. Raises YAMLError, or ValueError if it is nested too deep or its aliases expand too far."""
    depth = 0
    for event in yaml.parse(
        text, Loader=_Loader
    ):  # before anything is built: the loader calls itself for each level
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > DEEPEST:
            raise ValueError(TOO_DEEP)
    try:
        return _bounded(yaml.load(text, Loader=_Loader), MOST_VALUES)
    except RecursionError as error:  # aliases of aliases
        raise ValueError(TOO_DEEP) from error


def _parse_json(text: str) -> Any:
    try:
        return _bounded(json.loads(text))
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error


def _bounded(content: Any, most: float = math.inf) -> Any:
    """`content`. Raises ValueError for more than `most` values, counted as often as they occur, or deeper ones."""
    level, total = [content], 0
    for _ in range(DEEPEST + 1):
        parts = [value for value in level if isinstance(value, dict | list)]
        total += sum(map(len, parts)) + sum(
            len(value) // LONG_STRING for value in level if isinstance(value, str)
        )
        if total > most:
            raise ValueError(f"it expands to more than {most:,} values")
        level = [
            inner for part in parts for inner in (part.values() if isinstance(part, dict) else part)
        ]
        if not level:
            return content
    raise ValueError(TOO_DEEP)


def check(value: Any, schema: Any, name: str = "", complete: bool = False) -> None:
    """Raises ValueError, which names the part, such as `hardware.devices`, if `value` is not as `schema` says, or lacks
    a part of it where it must be complete."""
    kind: Any = type(schema) if isinstance(schema, dict | list) else schema
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kind) or (isinstance(value, bool) and not {bool, object} & {*kinds}):
        names = " or ".join(kind.__name__ for kind in kinds)
        given = "empty" if value is None else f"{type(value).__name__} in place of {names}"
        raise ValueError(f"{name or 'its content'} is {given}")
    if isinstance(schema, list):
        if complete and not value:
            raise ValueError(f"{name} is empty")
        for item in value:
            check(item, schema[0], f"an entry of {name or 'its content'}", complete)
    if isinstance(schema, dict):
        if str in schema and (others := [key for key in value if not isinstance(key, str)]):
            raise ValueError(
                f"{name} has the key {others[0]!r}, which is no string: put it in quotes"
            )
        for key, part in (dict.fromkeys(value, schema[str]) if str in schema else schema).items():
            inner = f"{name}.{key}".removeprefix(".")
            if value.get(key) is not None:
                check(value[key], part, inner, complete)
            elif complete:
                raise ValueError(f"{inner} is missing")


def _unreadable(path: str | Path, error: Exception, advice: str) -> UserError:
    reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(
        str(error).split()
    )
    return UserError(f"{path} cannot be read ({reason}): {advice}")
