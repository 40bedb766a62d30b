"""Search over ranges: `tune` has draws from them in place of the points of a grid.

    search: {method: sobol, draws: 16, seed: 0}

A line `key: {low: 1.0e-3, high: 3.0e-2, scale: log}` of `tune` is a range. Its other lines have the
choices of a grid, of which each draw takes one.

A draw follows from the lines of `tune`, the seed and the number of the draw. So arms with the same
lines have the same draws. Further draws do not change the earlier draws.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # loads its modules where they are first used: scipy.stats takes half a second
from numpy.typing import NDArray

from anlit.errors import UserError
from anlit.study.grid import (
    GRID_SCHEMA,
    GridPoint,
    check_schema,
    combine,
    is_range,
    line_choices,
    short_name,
)

METHODS = ("sobol", "random")
SCALES = ("linear", "log")
SEARCH_SCHEMA = {"method": str, "draws": int, "seed": int}
RANGE_SCHEMA = {"low": (int, float), "high": (int, float), "scale": str}
EXAMPLE = "search: {method: sobol, draws: 16, seed: 0}"
DIGITS = 3
"""Digits of a drawn number, so that names and hashes are short and alike on every machine."""
EDGE = 0.05
"""A value in the outermost 5 % of its range, on the range's scale, is at its edge."""
SPARE_DRAWS = 16
"""Draws for each that is asked for, because equal draws count once."""


@dataclass(frozen=True)
class SearchRange:
    """A range of a setting.

    Args:
        key: The dotted key, as `anlit fit` takes it.
        name: Its short name, for tables.
        low: The smallest value.
        high: The largest value.
        scale: `linear` or `log`: on which draws are even.
    """

    key: str
    name: str
    low: float
    high: float
    scale: str

    @property
    def is_integer(self) -> bool:
        """Whether draws are whole numbers: both ends are written so."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def is_log(self) -> bool:
        return self.scale == "log"

    @property
    def label(self) -> str:
        """`lr 0.001 … 0.03 (log)`."""
        details = ["log"] if self.is_log else []
        if self.is_integer:
            details.append("whole numbers")
        text = f"{self.name} {self.low:g} … {self.high:g}"
        return f"{text} ({', '.join(details)})" if details else text

    def value_at(self, share: float) -> float:
        """The value at a share of the range, from 0 to 1, rounded to `DIGITS`."""
        # Half a step more at each end gives all whole numbers the same chance.
        margin = 0.5 if self.is_integer else 0.0
        low = self._scaled(self.low - margin)
        high = self._scaled(self.high + margin)
        exact = low + share * (high - low)
        value = self._rounded(math.exp(exact) if self.is_log else exact)
        return min(max(value, self.low), self.high)

    def _rounded(self, value: float) -> float:
        """A whole number; `DIGITS` of the value on a logarithmic scale, else of the width."""
        if self.is_integer:
            return round(value)
        if self.is_log:
            return float(f"{value:.{DIGITS}g}")
        decimals = DIGITS - 1 - math.floor(math.log10(self.high - self.low))
        return round(value, decimals) + 0.0  # no -0.0

    def is_at_edge(self, value: float) -> bool:
        """Whether a value is in the outermost `EDGE` of the range, on its scale."""
        low = self._scaled(self.low)
        share = (self._scaled(value) - low) / (self._scaled(self.high) - low)
        return min(share, 1 - share) <= EDGE

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.is_log else value


Line = SearchRange | list[GridPoint]
"""A line of `tune`: a range, or choices."""


@dataclass(frozen=True)
class Search:
    """How the draws of a study are made.

    Args:
        method: `sobol`, or `random` for independent draws.
        draws: Number of draws for each arm.
        seed: The seed of the draws.
    """

    method: str
    draws: int
    seed: int = 0

    @property
    def label(self) -> str:
        """`16 draws by sobol, seed 0`, with what to know of their number."""
        text = f"{self.draws} draws by {self.method}, seed {self.seed}"
        low = 1 << (self.draws.bit_length() - 1)
        if self.method == "sobol" and low != self.draws:
            text += f" (the first of {2 * low}; Sobol's points are even at {low} and {2 * low})"
        return text

    def shares(self, n_draws: int, n_lines: int) -> NDArray[np.float64]:
        """Draws in [0, 1), of shape (n_draws, n_lines). A larger `n_draws` appends rows.

        `n_draws` is a power of two, at which Sobol's points are even in every line.
        """
        if self.method == "random":
            # Philox is a function of a key and a counter (Salmon and others, 2011).
            return np.random.Generator(np.random.Philox(self.seed)).random((n_draws, n_lines))
        generator = np.random.default_rng(self.seed)
        points = scipy.stats.qmc.Sobol(n_lines, scramble=True, rng=generator).random(n_draws)
        return np.asarray(points, dtype=np.float64)


def read_search(content: dict[str, Any], path: str) -> Search | None:
    """The `search` of a study's YAML. None without it.

    Raises:
        UserError: A value is missing or out of range.
    """
    entry = content.get("search")
    if entry is None:
        return None
    method = entry.get("method", METHODS[0])
    draws = entry.get("draws", 0)
    seed = entry.get("seed", 0)
    if method not in METHODS:
        raise UserError(
            f"search.method of {path} is {method}: choose one of {', '.join(METHODS)}, or leave "
            "`search` out for a grid"
        )
    if draws < 1:
        fault = f"is {draws}" if "draws" in entry else "is missing"
        raise UserError(f"search.draws of {path} {fault}: give 1 or more, such as 16")
    if seed < 0:
        raise UserError(f"search.seed of {path} is {seed}: give 0 or more")
    return Search(method, draws, seed)


def has_range(tune: Any) -> bool:
    """Whether a `tune`, or one of its grids, has a range."""
    for lines in tune if isinstance(tune, list) else [tune]:
        if isinstance(lines, dict) and any(map(is_range, lines.values())):
            return True
    return False


def draw_points(
    lines: Any, search: Search, location: str
) -> tuple[list[GridPoint], list[SearchRange]]:
    """The draws of a `tune`, all different, and its ranges.

    Raises:
        UserError: The lines have another form, or too few different settings. The message begins
            with `location`.
    """
    if isinstance(lines, list):
        raise UserError(f"{location} is a list, and has a range: give the lines of one mapping")
    check_schema(location, lines, GRID_SCHEMA)
    keys = list(lines)
    read_lines: list[Line] = []
    for key, values in sorted(lines.items()):
        if is_range(values):
            read_lines.append(_read_range(key, values, keys, location))
        else:
            choices = line_choices(key, values, keys, location)
            if not choices:
                raise UserError(f"{location} has no values for '{key}': give such as `[1, 2]`")
            read_lines.append(choices)
    ranges = [line for line in read_lines if isinstance(line, SearchRange)]
    # A line with a single value takes no part, so that it does not change the draws of the others.
    varied = [column for column, line in enumerate(read_lines) if _is_varied(line)]
    n_rows = SPARE_DRAWS << (search.draws - 1).bit_length()
    shares = np.zeros((n_rows, len(read_lines)))
    shares[:, varied] = search.shares(n_rows, len(varied))
    points: dict[str, GridPoint] = {}
    for row in shares.tolist():
        point = combine(list(map(_choose, read_lines, row)))
        points.setdefault(json.dumps(point.settings, sort_keys=True, default=str), point)
        if len(points) == search.draws:
            return list(points.values()), ranges
    raise UserError(
        f"{location} has {len(points)} different settings, and search.draws is {search.draws}: "
        "lower it, or widen the ranges"
    )


def _is_varied(line: Line) -> bool:
    """Whether a line has more than one value."""
    return isinstance(line, SearchRange) or len(line) > 1


def _choose(line: Line, share: float) -> GridPoint:
    """The choice of a line at a share of it."""
    if isinstance(line, SearchRange):
        value = line.value_at(share)
        return GridPoint({line.name: value}, {line.key: value})
    return line[int(share * len(line))]


def _read_range(key: str, entry: dict[str, Any], keys: list[str], location: str) -> SearchRange:
    """The range of a line. Raises UserError if it is none."""
    check_schema(f"'{key}' in {location}", entry, RANGE_SCHEMA)
    for end in ("low", "high"):
        if not math.isfinite(entry.get(end, math.nan)):
            raise UserError(f"'{key}' in {location} has no finite {end}: give a number")
    low = entry["low"]
    high = entry["high"]
    scale = entry.get("scale", SCALES[0])
    if low >= high:
        raise UserError(f"'{key}' in {location} has low {low} and high {high}: give a higher high")
    if scale not in SCALES:
        raise UserError(
            f"'{key}' in {location} has scale {scale}: choose one of {', '.join(SCALES)}"
        )
    if scale == "log" and low <= 0:
        raise UserError(
            f"'{key}' in {location} has scale log and low {low}: give a low above 0, or the scale "
            "linear"
        )
    name = short_name(key, keys)
    if isinstance(low, int) and isinstance(high, int):
        return SearchRange(key, name, low, high, scale)
    return SearchRange(key, name, float(low), float(high), scale)
