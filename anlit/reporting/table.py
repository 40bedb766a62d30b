"""Tables, in Markdown and in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from anlit.reporting.text import visible

NONE = "–"
"""A cell without a value."""
WIDTH = 170
"""Columns where the output is no terminal."""
LEAST = 16
"""Characters that a column of words keeps, however narrow the terminal."""


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """A table in Markdown.

    Args:
        head: Titles of the columns.
        rows: Cells, each already Markdown; line breaks become spaces.
        left: Columns that are aligned left. Numbers read better on the right, so the others are.
    """
    rule = [":---" if place in left else "---:" for place in range(len(head))]
    lines = [[_cell(cell) for cell in line] for line in (head, *rows)]
    lines.insert(1, rule)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def terminal_table(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)
) -> Table:
    """A table for `console.print`, aligned as `markdown_table` does.

    Cells are shown as they are: rich reads no markup in them, and control characters are spelled out.
    """
    rows = list(rows)

    def column(place: int) -> list[str]:
        return [row[place] for row in rows]

    table = Table(title=Text(visible(title)), title_justify="left")
    for place, name in enumerate(head):
        if place in left:
            table.add_column(Text(name), min_width=min(LEAST, max(map(len, (name, *column(place))))), overflow="fold")
        else:
            table.add_column(Text(name), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(visible(cell, keep="\n")) for cell in row))
    return table


def console() -> Console:
    """Standard output, as wide as the terminal, and wide enough for a table where there is none."""
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def _cell(text: str) -> str:
    return " ".join(text.split("\n")).replace("|", "\\|")
