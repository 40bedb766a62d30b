"""The registry of tables on the pages of results, which are computed from records."""

from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

Rows = list[list[Any]]
Key = tuple[str, str, int]
"""Page, heading, and the table's number below the heading."""
TABLES: dict[Key, Callable[[], Rows]] = {}
EMPTY = ""
UNRECORDED = ANY
"""A cell without a record. The table's function says why."""


def table(page: str, heading: str, number: int = 0) -> Callable[[Callable[[], Rows]], Any]:
    """Register the function that computes the rows of a table."""

    def register(rows: Callable[[], Rows]) -> Callable[[], Rows]:
        TABLES[page, heading, number] = rows
        return rows

    return register


ARCHITECTURES = "architectures.md"
ATTENTION = "attention.md"
SPEED = "speed.md"
INSIDE = "inside.md"
ENGLISH = "english.md"
TRANSFER = "transfer.md"
ANNEALED = "annealed.md"
