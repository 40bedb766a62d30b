"""Tables, in Markdown and in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

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


class Form(NamedTuple):
    """How much room a table takes."""

    is_narrow: bool
    """The headings of numbers are broken between words."""
    is_tight: bool
    """There are no vertical rules."""


FORMS = (Form(False, False), Form(True, False), Form(True, True))


class TerminalTable:
    """The first of these that fits: a table in one of `FORMS`, several with some columns each, a block for each row."""

    def __init__(self, title: str, head: list[str], rows: list[list[str]], left: Collection[int], names: int) -> None:
        self.title, self.head, self.rows, self.left, self.names = title, head, rows, left, names

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        every = list(range(len(self.head)))
        for form in FORMS:
            if self._fits(every, form, console, options):
                yield self._table(every, form, self.title)
                return
        title = self.title
        for columns in self._parts(console, options):
            if not self._fits(columns, FORMS[-1], console, options):
                yield from self._blocks(title)
                return
            yield self._table(columns, FORMS[-1], title)
            title = ""

    def _parts(self, console: Console, options: ConsoleOptions) -> list[list[int]]:
        """Columns of tables below each other; each has the names."""
        names = list(range(self.names))
        parts = [names]
        for column in range(self.names, len(self.head)):
            longer = [*parts[-1], column]
            if parts[-1] != names and not self._fits(longer, FORMS[-1], console, options):
                longer = [*names, column]
                parts.append(longer)
            parts[-1] = longer
        if any(not self._fits(part, FORMS[-1], console, options) for part in parts):
            return [list(range(len(self.head)))]  # too wide in any form of a table
        return parts

    def _fits(self, columns: list[int], form: Form, console: Console, options: ConsoleOptions) -> bool:
        table = self._table(columns, form, "")
        least = Measurement.get(console, options.update(max_width=UNLIMITED), table).minimum
        return least + form.is_tight <= options.max_width  # rich counts a table without edges one too narrow

    def _table(self, columns: list[int], form: Form, title: str) -> Table:
        tight: Any = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "show_edge": False}
        table = Table(
            title=Text(visible(title)) if title else None, title_justify="left", **(tight if form.is_tight else {})
        )
        for column in columns:
            lines = [line for row in self.rows for line in visible(row[column], keep="\n").split("\n")]
            width = max(map(cell_len, lines), default=0)
            if column in self.left:
                most = max(map(cell_len, [*self.head[column].split("\n"), *lines]))
                table.add_column(Text(self.head[column]), min_width=min(LEAST, most), overflow="fold")
            else:  # a fixed width, because rich narrows others below their smallest
                heading_parts = self.head[column].split() if form.is_narrow else self.head[column].split("\n")
                width = max([width, *map(cell_len, heading_parts)])
                table.add_column(Text(self.head[column]), justify="right", width=width, overflow="fold")
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
