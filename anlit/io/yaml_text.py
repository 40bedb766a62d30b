"""YAML as the package reads and writes it: `no`, `007` and dates are texts, `1e4` is an integer.

Depth, and the values to which aliases expand, are limited.
"""

import math
import re
from decimal import Decimal
from typing import Any, ClassVar

import yaml

MOST_DEPTH = 100
"""Lists and mappings within each other."""
TOO_DEEP = f"it is nested deeper than {MOST_DEPTH} lists and mappings"
MOST_VALUES = 1_000_000
"""Values in a YAML file, each counted as often as an alias repeats it."""
LONG_STRING = 1000
"""Characters that count as a value."""
MERGE_TAG = "tag:yaml.org,2002:merge"
BOOLEAN_WORDS = {"yes": True, "on": True, "no": False, "off": False}
"""Words that people write for true and false."""


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


COUNT_SUFFIXES = {
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "B": 10**9,
    "T": 10**12,
}
"""Ends of counts. A small m is milli, and G is a unit of bytes."""
COUNT = re.compile(rf"(\d+(?:\.\d+)?)([{''.join(COUNT_SUFFIXES)}])")


def parse_scalar(text: str) -> Any:
    """Return the boolean, number or null in `text`, for a key that needs it, or `text`.

    A count may end in one of `COUNT_SUFFIXES`: `2M` is 2,000,000.
    """
    count = COUNT.fullmatch(text)
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
        check_size(content, MOST_VALUES)
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


def check_size(content: Any, most_values: float = math.inf) -> None:
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
