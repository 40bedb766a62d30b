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
"""Width of the output in characters if it is no terminal."""
LEAST = 16
"""Smallest width of a text column in characters."""


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """A table in Markdown.

    Args:
        head: Titles of the columns.
        rows: Cells, each already Markdown; line breaks become spaces.
        left: Columns that are aligned left; the others, with numbers, are aligned right.
    """
    rule = [":---" if number in left else "---:" for number in range(len(head))]
    lines = [[_cell(cell) for cell in line] for line in (head, *rows)]
    lines.insert(1, rule)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def terminal_table(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)
) -> Table:
    """A table for `console.print`, aligned as in `markdown_table`.

    Cells are shown literally: without rich's markup, and with control characters escaped.
    """
    rows = list(rows)

    def column(number: int) -> list[str]:
        return [row[number] for row in rows]

    table = Table(title=Text(visible(title)), title_justify="left")
    for number, name in enumerate(head):
        if number in left:
            table.add_column(Text(name), min_width=min(LEAST, max(map(len, (name, *column(number))))), overflow="fold")
        else:
            table.add_column(Text(name), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(visible(cell, keep="\n")) for cell in row))
    return table


def console() -> Console:
    """Standard output, as wide as the terminal, or `WIDTH` without a terminal."""
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def _cell(text: str) -> str:
    return " ".join(text.split("\n")).replace("|", "\\|")
