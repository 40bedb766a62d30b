"""Reads small text files that may be damaged or foreign: JSON, YAML and CSV of runs, studies and reports.

Each is read with bounds on its size, its depth and what its aliases expand to, and checked against a schema, so a
reader after it meets no surprise. A schema is a type, a tuple of types, `[schema]` for a list of such values, or
`{key: schema}` for a mapping; a mapping may lack a key or hold null, and may have more keys.
"""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from anlit.errors import UserError

LARGEST_BYTES = 2**28
DEEPEST = 100
"""Lists and mappings within each other."""
TOO_DEEP = f"it is nested deeper than {DEEPEST} lists and mappings"
MOST_VALUES = 1_000_000
"""Values in a YAML file, each counted as often as an alias repeats it."""
LONG_STRING = 1000
"""Characters of a string in YAML that count as one value."""
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_text(path: str | Path) -> str:
    """The content of a regular file in UTF-8; raises OSError or ValueError for a pipe, a folder, or a large one."""
    if Path(path).exists() and not Path(path).is_file():
        raise OSError(0, "it is no regular file")
    with Path(path).open("rb") as file:
        content = file.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise ValueError(f"it has more than {LARGEST_BYTES:,} bytes")
    return content.decode()


def read_json(path: str | Path, schema: Any = object, advice: str = "repair or remove it") -> Any:
    """The content of a JSON file.

    Args:
        schema: What it must be.
        advice: What the user can do about a damaged one.

    Raises:
        UserError: It cannot be read, is no JSON, or is not as `schema` says. The message names the file.
    """
    return _read(path, _parse_json, schema, advice)


def read_yaml(path: str | Path, schema: Any = object, advice: str = "correct it there") -> Any:
    """The content of a YAML file; arguments and errors are those of `read_json`."""
    return _read(path, parse_yaml, schema, advice)


def _read(path: str | Path, parse: Callable[[str], Any], schema: Any, advice: str) -> Any:
    try:
        content = parse(read_text(path))
        check(content, schema)
        return content
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _unreadable(path, error, advice) from error


def read_rows(path: str | Path, advice: str = "repair it or leave the run out") -> list[dict[str, str]]:
    """The rows of a CSV file by its header, with "" for an empty cell. A last line without an end is left out.

    Raises UserError if it cannot be read, or has other rows than its header says. The message names the file.
    """
    try:
        lines = read_text(path).splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            lines.pop()
        reader = csv.DictReader(lines, restkey="", restval="", strict=True)
        rows = list(reader)
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


def parse_yaml(text: str) -> Any:
    """The content of YAML. Raises YAMLError, or ValueError if it is nested too deep or its aliases expand too far."""
    _refuse_large(text)
    return yaml.load(text, Loader=LOADER)


def check(value: Any, schema: Any, name: str = "", complete: bool = False) -> None:
    """Raises:
    ValueError: `value` is not as `schema` says, or lacks a part of it where it must be complete. The message names
        the part, such as `hardware.devices`.
    """
    kind: Any = type(schema) if isinstance(schema, dict | list) else schema
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kind) or (isinstance(value, bool) and not {bool, object} & {*kinds}):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{name or 'its content'} is {type(value).__name__} in place of {names}")
    if isinstance(schema, list):
        if complete and not value:
            raise ValueError(f"{name} is empty")
        for item in value:
            check(item, schema[0], f"an entry of {name or 'its content'}", complete)
    if isinstance(schema, dict):
        for key, part in schema.items():
            inner = f"{name}.{key}".removeprefix(".")
            if value.get(key) is not None:
                check(value[key], part, inner, complete)
            elif complete:
                raise ValueError(f"{inner} is missing")


def _parse_json(text: str) -> Any:
    def require_shallow(value: Any, depth: int = 0) -> None:
        if depth > DEEPEST:
            raise ValueError(TOO_DEEP)
        if isinstance(value, dict | list):
            for item in value.values() if isinstance(value, dict) else value:
                require_shallow(item, depth + 1)

    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    require_shallow(content)
    return content


def _refuse_large(text: str) -> None:
    """Count the values that a YAML text expands to, and their depth, from its events alone: nothing is built."""
    anchors: dict[str, tuple[int, int]] = {}
    nodes: list[tuple[str | None, int, int]] = [(None, 0, 0)]  # that are open: anchor, values, levels below
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            nodes.append((event.anchor, 1, 0))
        elif isinstance(event, yaml.NodeEvent | yaml.CollectionEndEvent):
            if isinstance(event, yaml.AliasEvent):
                if event.anchor not in anchors:
                    raise ValueError(f"its alias *{event.anchor} is within itself or unknown")
                anchor, (values, depth) = None, anchors[event.anchor]
            elif isinstance(event, yaml.ScalarEvent):
                anchor, values, depth = event.anchor, 1 + len(event.value) // LONG_STRING, 0
            else:
                anchor, values, depth = nodes.pop()
            if anchor is not None:
                anchors[anchor] = values, depth
            above, more, deepest = nodes[-1]
            nodes[-1] = above, more + values, max(deepest, depth + 1)
            if more + values > MOST_VALUES:
                raise ValueError(f"it expands to more than {MOST_VALUES:,} values")
        if len(nodes) + nodes[-1][2] > DEEPEST + 1:
            raise ValueError(TOO_DEEP)


def _unreadable(path: str | Path, error: Exception, advice: str) -> UserError:
    reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
    return UserError(f"{path} cannot be read ({reason}): {advice}")
