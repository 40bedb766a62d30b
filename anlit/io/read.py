"""Reads small text files that may be damaged or foreign: JSON, YAML and CSV. Also writes YAML.

Size, depth and the expansion of aliases are limited. The content is checked against a schema:

- a type, or a tuple of types;
- `[schema]` for a list of such values;
- `{key: schema}` for a mapping. It may lack a key or hold null, and may have more keys;
- `{str: schema}` for a mapping with any strings as keys.
"""

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import yaml

from anlit.errors import UserError

LARGEST_BYTES = 2**28
MOST_DEPTH = 100
"""Lists and mappings within each other."""
TOO_DEEP = f"it is nested deeper than {MOST_DEPTH} lists and mappings"
MOST_VALUES = 1_000_000
"""Values in a YAML file, each counted as often as an alias repeats it."""
LONG_STRING = 1000
"""Characters that count as a value."""
MERGE_TAG = "tag:yaml.org,2002:merge"
STEP = re.compile(r"(-?\d{1,18}(\.\d*)?)?")
"""The step of a row of metrics.csv. A user's callback may log none, or a step of its own."""
LEAVE_OUT = "repair the file or leave the run out"
BOOLEAN_WORDS = {"yes": True, "on": True, "no": False, "off": False}
"""Words that people write for true and false."""


def read_text(path: str | Path) -> str:
    """Return the content of a regular file in UTF-8.

    Raises OSError or ValueError for a pipe, a folder, or a large file.
    """
    return _decode(_read_bytes(path))


def _read_bytes(path: str | Path) -> bytes:
    if Path(path).exists() and not Path(path).is_file():
        raise OSError(0, "it is not a regular file")
    with Path(path).open("rb") as file:
        content = file.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise ValueError(f"it has more than {LARGEST_BYTES:,} bytes")
    return content


def _decode(content: bytes) -> str:
    """Return text in UTF-8. Raise ValueError with the line that is none."""
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
        raise _read_error(path, error, advice) from error


class Row(dict[str, str]):
    """A row of metrics.csv: text by column, "" for an empty cell."""

    def __init__(self, cells: Iterable[tuple[str, str]], line: int) -> None:
        super().__init__(cells)
        self.line = line
        """The line of the file in which the row begins, counted from 1."""


def read_rows(path: str | Path, last_bytes: int | None = None) -> list[Row]:
    """Return the rows of metrics.csv. With `last_bytes` only the rows there are read and counted.

    A last line without a line end is left out: it is of a run that writes, or was killed. Raises
    UserError, with file and line, if another line does not fit the header or has no step.
    """
    try:
        if last_bytes is not None and Path(path).stat().st_size > last_bytes:
            return _parse_rows(_read_end(path, last_bytes))
        return _parse_rows(_read_bytes(path))
    except (OSError, ValueError) as error:
        raise _read_error(path, error, LEAVE_OUT) from error


def _read_end(path: str | Path, n_bytes: int) -> bytes:
    """Return the first line of a file, and the whole lines in its last bytes."""
    with Path(path).open("rb") as file:
        header = file.readline(n_bytes)
        file.seek(-n_bytes, os.SEEK_END)
        _, _, whole_lines = file.read().partition(b"\n")
    return header + whole_lines


def _parse_rows(content: bytes) -> list[Row]:
    """Return the rows of CSV. Raise ValueError with the line that is not a row."""
    complete_lines = content[: content.rfind(b"\n") + 1]
    reader = csv.reader(io.StringIO(_decode(complete_lines), newline=""), strict=True)
    rows: list[Row] = []
    line = 1
    try:
        header = next(reader, [])
        if header and "step" not in header:
            raise ValueError("its first line names no column 'step'")
        line = reader.line_num + 1
        for cells in reader:
            if cells:
                rows.append(_parse_row(header, cells, line))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {line}: {error}") from error
    return rows


def _parse_row(header: list[str], cells: list[str], line: int) -> Row:
    if len(cells) != len(header):
        raise ValueError(f"line {line} does not have the {len(header)} cells of the first line")
    row = Row(zip(header, cells, strict=True), line)
    if not STEP.fullmatch(row["step"]):
        raise _not_a_number(row, "step")
    return row


def parse_cell(row: Row, column: str, path: str | Path) -> float:
    """Return the number in a cell, NaN without a number. Raise UserError for another text."""
    try:
        return float(row.get(column) or math.nan)
    except ValueError as error:
        raise _read_error(path, _not_a_number(row, column), LEAVE_OUT) from error


def _not_a_number(row: Row, column: str) -> ValueError:
    text = row[column][:40]
    return ValueError(f"line {row.line} has {text!r} as {column}, which is not a number")


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper, with quotes around each text that `parse_yaml` would read as a number."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML without its surprises: `no`, `007`, `2024_11`, `10:00:00` and dates are texts.

    YAML 1.1 reads them as a boolean, an octal number, two integers and a number of base 60. If a
    key needs a number or a boolean, `parse_scalar` reads the text. `1e4` and `1.5e4` are integers,
    `1e-3` is a number, and `1_000_000` is an integer too.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}


NULL_PATTERN = re.compile(r"(~|null|Null|NULL|)$")
BOOLEAN_PATTERN = re.compile(r"(true|True|TRUE|false|False|FALSE)$")
INTEGER_PATTERN = re.compile(
    r"[-+]?(0|[1-9]\d*|[1-9]\d{0,2}(_\d{3})+|0x[0-9a-fA-F]+|\d+(\.\d+)?[eE]\+?\d\d?)$"
)
NUMBER_PATTERN = re.compile(
    r"[-+]?(\d+\.\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))$"
    r"|\.(nan|NaN|NAN)$"
)


def _add_resolver(kind: str, pattern: re.Pattern[str], first_characters: list[str]) -> None:
    """Let plain text that matches a pattern be of a kind, by its first characters."""
    tag = f"tag:yaml.org,2002:{kind}"
    _Loader.add_implicit_resolver(tag, pattern, first_characters)
    _Dumper.add_implicit_resolver(tag, pattern, first_characters)


# The first resolver that matches decides.
_add_resolver("null", NULL_PATTERN, ["~", "n", "N", ""])
_add_resolver("bool", BOOLEAN_PATTERN, list("tTfF"))
_add_resolver("int", INTEGER_PATTERN, list("-+0123456789"))
_add_resolver("float", NUMBER_PATTERN, list("-+0123456789."))
_add_resolver("merge", re.compile("<<$"), ["<"])


def _construct_integer(loader: Any, node: yaml.ScalarNode) -> int | float:
    """Return the integer in a node, or a float if an exponent leaves a fraction: `1.25e1`."""
    text = loader.construct_scalar(node).replace("_", "")
    if "x" in text:
        return int(text, 16)
    exact = Decimal(text)
    return int(exact) if exact == exact.to_integral_value() else float(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_integer)


def dump_yaml(content: Any) -> str:
    """Return YAML that YAML 1.1 and `parse_yaml` read alike, with keys in their order."""
    return yaml.dump(
        content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )


COUNT_SUFFIXES = {"k": 1_000, "M": 1_000_000, "B": 1_000_000_000, "T": 1_000_000_000_000}


def parse_scalar(text: str) -> Any:
    """Return the boolean, number or null in `text`, for a key that needs it, or `text`.

    A count may end in k, M, B or T: `2M` is 2,000,000.
    """
    count = re.fullmatch(r"(\d+(?:\.\d+)?)([kMBT])", text)
    if count is not None:
        value = Decimal(count[1]) * COUNT_SUFFIXES[count[2]]
        return int(value) if value == value.to_integral_value() else text
    if re.fullmatch(r"[-+]?\d[\d_]*", text):
        return int(text.replace("_", ""))
    boolean = BOOLEAN_WORDS.get(text.strip().lower())
    if boolean is not None:
        return boolean
    content = parse_yaml(text)
    return text if isinstance(content, dict | list) else content


def parse_yaml(text: str) -> Any:
    """Return the content of YAML.

    Raises YAMLError, or ValueError for a repeated key, for content nested too deep, or for aliases
    that expand too far.
    """
    try:
        _check_depth(text)
    except yaml.scanner.ScannerError as error:
        _refuse_tab(text, error)
        raise
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        _refuse_repeated_keys(node)
        content = loader.construct_document(node) if node is not None else None
        _check_size(content, MOST_VALUES)
        return content
    except RecursionError as error:  # aliases of aliases
        raise ValueError(TOO_DEEP) from error
    finally:
        loader.dispose()


def _refuse_tab(text: str, error: yaml.scanner.ScannerError) -> None:
    """Raise ValueError if a tab is what the scanner cannot read."""
    mark = error.problem_mark
    if mark is not None and text.split("\n")[mark.line][mark.column :].startswith("\t"):
        raise ValueError(f"line {mark.line + 1} has a tab where YAML takes spaces") from error


def _check_depth(text: str) -> None:
    """Raise ValueError for deep YAML, before the loader builds it with a call for each level."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MOST_DEPTH:
            raise ValueError(TOO_DEEP)


def _refuse_repeated_keys(document: yaml.Node | None) -> None:
    """Raise ValueError for a mapping with a repeated key. YAML keeps the last without a warning."""
    nodes: list[tuple[str, Any]] = [("", document)]
    visited: set[int] = set()
    while nodes:
        path, node = nodes.pop()
        if id(node) in visited:  # an alias
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                nodes.append((f"{path}.{number}", item))
        elif isinstance(node, yaml.MappingNode):
            lines: dict[tuple[str, str], int] = {}
            for key, value in node.value:
                name = f"{path}.{key.value}".removeprefix(".")
                if isinstance(key, yaml.ScalarNode) and key.tag != MERGE_TAG:
                    _record_key(key, name, lines)
                nodes.append((name, value))


def _record_key(key: yaml.ScalarNode, name: str, lines: dict[tuple[str, str], int]) -> None:
    """Record the line of a key. Raise ValueError if its mapping has it already."""
    line = key.start_mark.line + 1
    first_line = lines.get((key.tag, key.value))
    if first_line is not None:
        location = f", in lines {first_line} and {line}" if first_line < line else ""
        raise ValueError(f"{name} is written twice{location}")
    lines[key.tag, key.value] = line


def _parse_json(text: str) -> Any:
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    _check_size(content)
    return content


def _check_size(content: Any, most_values: float = math.inf) -> None:
    """Raise ValueError for content with too many values or too many levels.

    A value counts as often as it occurs.
    """
    waiting = [(content, 0)]
    total = 0
    while waiting:
        value, depth = waiting.pop()
        if depth > MOST_DEPTH:
            raise ValueError(TOO_DEEP)
        total += 1
        if isinstance(value, str):
            total += len(value) // LONG_STRING
        elif isinstance(value, dict | list):
            items = value.values() if isinstance(value, dict) else value
            waiting += [(item, depth + 1) for item in items]
        if total > most_values:
            raise ValueError(f"it expands to more than {most_values:,} values")


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


def _read_error(path: str | Path, error: Exception, advice: str) -> UserError:
    reason = error.strerror if isinstance(error, OSError) else None
    if not reason:
        reason = " ".join(str(error).replace('in "<unicode string>", ', "in ").split())
    return UserError(f"{path} cannot be read ({reason}): {advice}")
