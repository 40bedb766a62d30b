"""The points of a grid in a study's YAML."""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anlit.errors import UserError
from anlit.io.read import check_content
from anlit.runs.labels import short_names

GRID_SCHEMA = {str: object}
UNSAFE_CHARACTER = re.compile(r"[^\w.+=-]")
"""A character that shells and file systems may treat specially."""
MAY_BE_NULL = (dict, (dict, list))
"""Schemas of budgets and grids: `tune: null` leaves the shared grid out."""
DATA_SEED = "data.init_args.seed"


@dataclass(frozen=True, eq=False)
class GridPoint:
    """A point of a grid."""

    shown: dict[str, Any]
    """Values by short name, for tables."""
    settings: dict[str, Any]
    """Values by dotted key, as `anlit fit` takes them."""

    @property
    def label(self) -> str:
        """`lr=0.004, size=d128`, for tables; empty if the point changes nothing."""
        return ", ".join(f"{key}={safe_name(value)}" for key, value in self.shown.items())

    @property
    def name(self) -> str:
        """`lr=0.004_size=d128`, for folders."""
        return self.label.replace(", ", "_")


def expand_grid(grids: Any, location: str) -> list[GridPoint]:
    """Expand a grid, or a list of grids, to distinct points.

    A grid is the product of its lines. The line `key: value` or `key: [values]` has values of the
    setting with that dotted key. The line `name: {choice: {key: value, …}, …}` has named choices
    that change several settings together. Without a grid, the only point changes nothing. Ranges
    are not points: `search.py` draws from them.

    Raises:
        UserError: The grid has another form. The message begins with `location`.
    """
    all_grids = grids if isinstance(grids, list) else [grids or {}]
    keys: list[str] = []
    for lines in all_grids:
        if isinstance(lines, dict):
            keys += lines
    keys = list(dict.fromkeys(keys))
    points: dict[str, GridPoint] = {}
    for lines in all_grids:
        check_schema(location, lines, GRID_SCHEMA)
        choices_by_line = []
        for key, values in sorted(lines.items()):
            choices_by_line.append(line_choices(key, values, keys, location))
        for choices in itertools.product(*choices_by_line):
            point = combine(choices)
            identity = json.dumps(point.settings, sort_keys=True, default=str)
            points.setdefault(identity, point)
    if not points:
        raise UserError(
            f"{location} has no values: leave it out, or give such as `{{dotted.key: [1, 2]}}`"
        )
    return list(points.values())


def line_choices(key: str, values: Any, keys: list[str], location: str) -> list[GridPoint]:
    """The choices of a line; `keys` are the keys of all lines.

    Raises:
        UserError: It is a range, or its named choices have another form.
    """
    if is_range(values):
        raise UserError(
            f"{location} has a range for '{key}', and only `tune` draws from ranges: give values "
            "such as `[1, 2]`"
        )
    if isinstance(values, dict) and "class_path" not in values:
        for name, settings in values.items():
            check_schema(f"the choice {name!r} of '{key}' in {location}", settings, GRID_SCHEMA)
        return [GridPoint({key: name}, settings) for name, settings in values.items()]
    name = short_name(key, keys)
    listed_values = values if isinstance(values, list) else [values]
    return [GridPoint({name: value}, {key: value}) for value in listed_values]


def is_range(values: Any) -> bool:
    """Whether a line has `{low: …, high: …}`, not choices that are named so."""
    if not isinstance(values, dict) or not {"low", "high"} & set(values):
        return False
    return not any(isinstance(value, dict) for value in values.values())


def short_name(key: str, keys: list[str]) -> str:
    """The last name of a dotted key; more of it if several keys end in this name."""
    return "data_seed" if key == DATA_SEED else short_names(keys)[key]


def combine(choices: Sequence[GridPoint]) -> GridPoint:
    """The point that has all choices, one of each line."""
    shown: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for choice in choices:
        shown |= choice.shown
        settings |= choice.settings
    return GridPoint(shown, settings)


def safe_name(value: Any) -> str:
    """A value for a folder's name, without characters special to shells and file systems."""
    if isinstance(value, dict):
        value = str(value.get("class_path", "set")).rsplit(".", 1)[-1]
    return UNSAFE_CHARACTER.sub("-", str(value))


def check_schema(location: str, content: Any, schema: dict[Any, Any]) -> None:
    """Check a part of a study's YAML against a schema (`anlit.io.read.check_content`).

    Raises:
        UserError: A value has another type. At any depth a key is not in the schema, or has no
            value.
    """
    try:
        check_content(content, schema)
    except ValueError as error:
        raise UserError(f"{location} is not as docs/studies.md says: {error}") from error
    _check_keys(location, content, schema)


def _check_keys(location: str, content: Any, schema: Any) -> None:
    """Raise UserError for an unknown key, and for a key without a value."""
    if isinstance(schema, list):
        for entry in content:
            _check_keys(f"an entry of {location}", entry, schema[0])
    if not isinstance(schema, dict) or schema == GRID_SCHEMA:
        return
    for key, value in content.items():
        key_schema = schema.get(str, schema.get(key))
        if key_schema is None:
            choices = ", ".join(sorted(schema)) or "none"
            raise UserError(f"{location} has the unknown key '{key}': the known ones are {choices}")
        if value is not None:
            _check_keys(f"{key} of {location}", value, key_schema)
        elif key_schema not in MAY_BE_NULL:
            raise UserError(f"{location} has no value for '{key}': give one, or leave it out")
