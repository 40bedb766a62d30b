"""Tables, in Markdown and in the terminal."""

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from anlit.reporting.text import PLAIN_CONTROLS, without_control_codes

NONE = "–"
"""A cell without a value."""
UNLIMITED_WIDTH = 10_000
"""Characters in a line if the output is not a terminal."""
MIN_TEXT_WIDTH = 16
"""Characters in the narrowest column of text."""


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)
) -> str:
    """Return a table in Markdown; cells are Markdown.

    Columns in `left` have text. All others have numbers and are aligned right.
    """
    alignment = [":---" if number in left else "---:" for number in range(len(head))]
    lines = [_markdown_row(head), f"| {' | '.join(alignment)} |"]
    lines += map(_markdown_row, rows)
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    escaped = [cell.replace("\n", " ").replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


@dataclass(frozen=True, eq=False)
class Table:
    """A table for Markdown and for `console().print`, which shows every character literally.

    In a terminal that is too narrow, each row is a block of lines. Columns of text, `left`, may be
    wrapped.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int] = (0,)

    def markdown(self) -> str:
        """Return the table in Markdown, without its title; cells are already Markdown."""
        return markdown_table(self.head, self.rows, self.left)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RichTable | Text]:
        rows = [_visible_cells(row) for row in self.rows]
        title = Text(without_control_codes(self.title))
        table = self._rich_table(title, rows)
        unlimited = options.update(max_width=UNLIMITED_WIDTH)
        width = Measurement.get(console, unlimited, table).minimum
        if width < options.max_width:  # rich's width of a table without edges is too small by 1
            yield table
            return
        yield title
        for row in rows:
            yield self._row_as_lines(row)

    def _rich_table(self, title: Text, rows: Sequence[Sequence[str]]) -> RichTable:
        table = RichTable(
            title=title,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            show_edge=False,
        )
        for column, heading in enumerate(self.head):
            is_text = column in self.left
            lines = heading.split("\n" if is_text else None)
            for row in rows:
                lines += row[column].split("\n")
            width = max(map(cell_len, lines), default=0)
            size: dict[str, Any] = {"min_width": min(MIN_TEXT_WIDTH, width)}
            if not is_text:
                # A fixed width, because rich narrows other columns below their smallest.
                size = {"justify": "right", "width": width}
            table.add_column(Text(heading), overflow="fold", **size)
        for row in rows:
            table.add_row(*map(Text, row))
        return table

    def _row_as_lines(self, row: Sequence[str]) -> Text:
        text = ""
        for heading, cell in zip(self.head, row, strict=True):
            name = " ".join(heading.split())
            line = cell.replace("\n", " ")
            text += f"\n  {name}: {line}" if name else f"\n  {line}"
        return Text(text, overflow="fold")


def _visible_cells(row: Sequence[str]) -> list[str]:
    return [without_control_codes(cell, keep="\n") for cell in row]


class SafeConsole(Console):
    """A console that prints strings literally: without markup, and with control codes escaped."""

    def print(self, *objects: Any, **options: Any) -> None:
        visible_objects = []
        for item in objects:
            if isinstance(item, str):
                item = without_control_codes(item, PLAIN_CONTROLS)
            visible_objects.append(item)
        super().print(*visible_objects, **{"markup": False, "highlight": False} | options)


def console() -> SafeConsole:
    """Return a console for standard output, as wide as the terminal.

    Without a terminal no line is wrapped.
    """
    return SafeConsole(width=None if sys.stdout.isatty() else UNLIMITED_WIDTH)
