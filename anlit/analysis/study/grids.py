"""Grids of settings: `vary` and `tune` of a study's YAML."""

import itertools
import json
from dataclasses import dataclass
from typing import Any

from anlit.errors import UserError


@dataclass(frozen=True, eq=False)
class Setting:
    """One point of a grid.

    Args:
        shown: Short name → value, for folder names, tables and plots.
        settings: Dotted key → value, as `anlit fit` takes them.
    """

    shown: dict[str, Any]
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """`lr=0.004_size=d128`; empty for an empty choice."""
        return "_".join(f"{key}={plain(value)}" for key, value in self.shown.items())

    @property
    def words(self) -> str:
        """`lr=0.004, size=d128`, for tables."""
        return ", ".join(f"{key}={plain(value)}" for key, value in self.shown.items())

    @property
    def key(self) -> str:
        """Equal for choices of the same settings."""
        return json.dumps(self.settings, sort_keys=True, default=str)

    def __add__(self, other: "Setting") -> "Setting":
        return Setting(self.shown | other.shown, self.settings | other.settings)


UNCHANGED = Setting({}, {})


def grid(grids: Any, where: str) -> list[Setting]:
    """All points of a grid, or of a list of grids, each once; [UNCHANGED] without a grid.

    In a grid `key: value` and `key: [values]` are values of the setting with that dotted key; `name: {choice: {key:
    value, …}, …}` are named choices that change several settings together. A grid is the product of its lines.

    Raises:
        UserError: `grids` has another form; `where` says what it belongs to.
    """
    points: dict[str, Setting] = {}
    for lines in grids if isinstance(grids, list) else [grids or {}]:
        if not isinstance(lines, dict):
            raise UserError(f"{where} must be a mapping of settings to lists of values, or a list of such mappings")
        for combination in itertools.product(*(_line(key, values, where) for key, values in sorted(lines.items()))):
            point = sum(combination, UNCHANGED)
            points.setdefault(point.key, point)
    return list(points.values())


def plain(value: Any) -> str:
    """A value for a folder's name, without characters that are special to shells and file systems."""
    if isinstance(value, dict):
        value = str(value.get("class_path", "set")).rsplit(".", 1)[-1]
    return "".join(letter if letter.isalnum() or letter in "._+-=" else "-" for letter in str(value))


def _line(key: str, values: Any, where: str) -> list[Setting]:
    if isinstance(values, dict) and "class_path" not in values:
        if not all(isinstance(settings, dict) for settings in values.values()):
            raise UserError(f"{where}: each choice of '{key}' must be a mapping of dotted keys to values")
        return [Setting({key: name}, settings) for name, settings in values.items()]
    return [Setting({short(key): value}, {key: value}) for value in (values if isinstance(values, list) else [values])]


def short(key: str) -> str:
    """The last part of a dotted key; `data_seed` for the data's seed."""
    return "data_seed" if key == "data.init_args.seed" else key.rsplit(".", 1)[-1]
