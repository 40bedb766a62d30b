"""Reads small text files that may be damaged or foreign: JSON, YAML and CSV of runs, studies and reports; writes YAML.

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
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

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


class _Dumper(yaml.SafeDumper):
    """PyYAML's own, with quotes around each text that `parse_yaml` would read as a number."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML without its surprises: `no`, `007`, `2024_11`, `10:00:00` and dates are texts.

    YAML 1.1 reads them as a boolean, an octal number, two integers and a number of base 60. Where a key needs a number
    or a boolean, `parse_scalar` reads the text. `1e4` and `1.5e4` are integers, `1e-3` is a number, and `1_000_000` is
    an integer too.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}


INTEGER = re.compile(
    r"[-+]?(0|[1-9]\d*|[1-9]\d{0,2}(_\d{3})+|0x[0-9a-fA-F]+|\d+(\.\d+)?[eE]\+?\d\d?)$"
)
NUMBER = re.compile(
    r"[-+]?(\d+\.\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"
)
for _kind, _form, _first in (
    ("null", re.compile(r"(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", INTEGER, list("-+0123456789")),
    ("float", NUMBER, list("-+0123456789.")),
    ("merge", re.compile("<<$"), ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _form, _first)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _form, _first)


def _integer(loader: Any, node: yaml.ScalarNode) -> int | float:
    """The integer in a node; the number, where an exponent leaves a fraction: `1.25e1`."""
    text = loader.construct_scalar(node).replace("_", "")
    if "x" in text:
        return int(text, 16)
    exact = Decimal(text)
    return int(exact) if exact == exact.to_integral_value() else float(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def dump_yaml(content: Any) -> str:
    """YAML that every reader takes for the same content, by YAML 1.1 and by `parse_yaml`; keys in their order."""
    return yaml.dump(
        content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )


MERGE = "tag:yaml.org,2002:merge"
WORDS = {"yes": True, "on": True, "no": False, "off": False}
"""What people write for true and false."""


def parse_scalar(text: str) -> Any:
    """The boolean, number or null that `text` means for a key that needs one; `text`, if it means none."""
    if re.fullmatch(r"[-+]?\d[\d_]*", text):
        return int(text.replace("_", ""))
    if (word := WORDS.get(text.strip().lower())) is not None:
        return word
    content = parse_yaml(text)
    return text if isinstance(content, dict | list) else content


def parse_yaml(text: str) -> Any:
    """The content of YAML, in which no mapping has a key twice.

    Raises YAMLError, or ValueError for a key that is written twice, for content that is nested too deep, or whose
    aliases expand too far.
    """
    depth = 0
    for event in yaml.parse(
        text, Loader=_Loader
    ):  # before anything is built: the loader calls itself for each level
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > DEEPEST:
            raise ValueError(TOO_DEEP)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        _refuse_repeated_keys(node)
        content = loader.construct_document(node) if node is not None else None
        return _bounded(content, MOST_VALUES)
    except RecursionError as error:  # aliases of aliases
        raise ValueError(TOO_DEEP) from error
    finally:
        loader.dispose()


def _refuse_repeated_keys(document: yaml.Node | None) -> None:
    """Raise ValueError for a mapping with a key twice: YAML's readers keep the last one without a word."""
    nodes: list[tuple[str, Any]] = [("", document)]
    visited: set[int] = set()
    while nodes:
        path, node = nodes.pop()
        if id(node) in visited:  # an alias
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += [(f"{path}.{number}", item) for number, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            lines: dict[tuple[str, str], int] = {}
            for key, value in node.value:
                name = f"{path}.{key.value}".removeprefix(".")
                if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                    line = key.start_mark.line + 1
                    if first := lines.get((key.tag, key.value)):
                        where = f", in lines {first} and {line}" if first < line else ""
                        raise ValueError(f"{name} is written twice{where}")
                    lines[key.tag, key.value] = line
                nodes.append((name, value))


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
