"""Tables, in Markdown and in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from anlit.reporting.text import visible

NONE = "–"
"""A cell without a value."""
UNLIMITED = 10_000
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
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,), names: int = 1
) -> TerminalTable:
    """A table for `console().print`, aligned as in `markdown_table`, which loses no character whatever the width.

    Cells are shown literally: without rich's markup, and with control characters escaped.

    Args:
        title: The line above it.
        head: Titles of the columns.
        rows: Cells.
        left: Columns of text, which may be wrapped; cells of the others are never wrapped.
        names: The first columns, which tell rows apart.
    """
    return TerminalTable(title, list(head), [list(row) for row in rows], left, names)


class TerminalTable:
    """The first of these forms that fits: ruled, without vertical rules, split by columns, a block for each row."""

    def __init__(self, title: str, head: list[str], rows: list[list[str]], left: Collection[int], names: int) -> None:
        self.title, self.head, self.rows, self.left, self.names = title, head, rows, left, names

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        every = list(range(len(self.head)))
        for is_tight in (False, True):
            if self._fits(every, is_tight, console, options):
                yield self._table(every, is_tight, self.title)
                return
        title = self.title
        for columns in self._parts(console, options):
            if not self._fits(columns, True, console, options):
                yield from self._blocks(title)
                return
            yield self._table(columns, True, title)
            title = ""

    def _parts(self, console: Console, options: ConsoleOptions) -> list[list[int]]:
        """Columns of tables below each other; each has the names."""
        names = list(range(self.names))
        parts = [names]
        for column in range(self.names, len(self.head)):
            longer = [*parts[-1], column]
            if parts[-1] != names and not self._fits(longer, True, console, options):
                longer = [*names, column]
                parts.append(longer)
            parts[-1] = longer
        if any(not self._fits(part, True, console, options) for part in parts):
            return [list(range(len(self.head)))]  # too wide in any form of a table
        return parts

    def _fits(self, columns: list[int], is_tight: bool, console: Console, options: ConsoleOptions) -> bool:
        table = self._table(columns, is_tight, "")
        return Measurement.get(console, options.update(max_width=UNLIMITED), table).minimum <= options.max_width

    def _table(self, columns: list[int], is_tight: bool, title: str) -> Table:
        tight: Any = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "show_edge": False}
        table = Table(
            title=Text(visible(title)) if title else None, title_justify="left", **(tight if is_tight else {})
        )
        for column in columns:
            lines = [line for row in self.rows for line in visible(row[column], keep="\n").split("\n")]
            width = max(map(cell_len, lines), default=0)
            if column in self.left:
                most = max(map(cell_len, [*self.head[column].split("\n"), *lines]))
                table.add_column(Text(self.head[column]), min_width=min(LEAST, most), overflow="fold")
            else:
                table.add_column(Text(self.head[column]), justify="right", min_width=width, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(visible(row[column], keep="\n")) for column in columns))
        return table

    def _blocks(self, title: str) -> Iterator[Text]:
        yield Text(visible(title))
        for row in self.rows:
            lines = [f"  {name}: {cell}" if name else f"  {cell}" for name, cell in zip(self.head, row, strict=True)]
            yield Text("\n".join(["", *(visible(" ".join(line.split("\n"))) for line in lines)]), overflow="fold")


def console() -> Console:
    """Standard output, as wide as the terminal; without a terminal nothing is wrapped."""
    return Console(width=None if sys.stdout.isatty() else UNLIMITED)


def _cell(text: str) -> str:
    return " ".join(text.split("\n")).replace("|", "\\|")
