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

from anlit.reporting.text import KEPT, without_control_codes

NONE = "–"
"""A cell without a value."""
UNLIMITED, LEAST = 10_000, 16
"""Characters in a line if the output is no terminal; in the narrowest column of text."""


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)
) -> str:
    """A table in Markdown, whose cells are Markdown; columns other than `left`, with numbers, are aligned right."""
    lines = [
        [" ".join(cell.split("\n")).replace("|", "\\|") for cell in line] for line in (head, *rows)
    ]
    lines.insert(1, [":---" if number in left else "---:" for number in range(len(head))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True, eq=False)
class Table:
    """A table for Markdown and for `console().print`, which shows every character literally.

    In a terminal that is too narrow each row is a block of lines. Columns of text, `left`, may be wrapped.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int] = (0,)

    def markdown(self) -> str:
        """The table in Markdown, without its title; cells are Markdown already."""
        return markdown_table(self.head, self.rows, self.left)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RichTable | Text]:
        rows = [[without_control_codes(cell, keep="\n") for cell in row] for row in self.rows]
        title = Text(without_control_codes(self.title))
        table = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
                          show_edge=False)  # fmt: skip
        for column, heading in enumerate(self.head):
            is_text, lines = (
                column in self.left,
                [line for row in rows for line in row[column].split("\n")],
            )
            width = max(
                map(cell_len, [*heading.split("\n" if is_text else None), *lines]), default=0
            )
            # A fixed width for numbers, because rich narrows others below their smallest.
            size: dict[str, Any] = (
                {"min_width": min(LEAST, width)}
                if is_text
                else {"justify": "right", "width": width}
            )
            table.add_column(Text(heading), overflow="fold", **size)
        for row in rows:
            table.add_row(*map(Text, row))
        least = Measurement.get(console, options.update(max_width=UNLIMITED), table).minimum
        if least < options.max_width:  # rich counts a table without edges one too narrow
            yield table
            return
        yield title
        for row in rows:
            cells = zip((" ".join(heading.split()) for heading in self.head), row, strict=True)
            lines = [f"{name}: {cell}" if name else cell for name, cell in cells]
            yield Text(
                "".join("\n  " + " ".join(line.split("\n")) for line in lines), overflow="fold"
            )


class SafeConsole(Console):
    """A console that prints strings literally: without rich's markup, and with control characters escaped."""

    def print(self, *objects: Any, **options: Any) -> None:
        shown = [
            without_control_codes(part, KEPT) if isinstance(part, str) else part for part in objects
        ]
        super().print(*shown, **{"markup": False, "highlight": False} | options)


def console(stderr: bool = False) -> SafeConsole:
    """Standard output or error, as wide as the terminal; without a terminal nothing is wrapped."""
    stream = sys.stderr if stderr else sys.stdout
    return SafeConsole(width=None if stream.isatty() else UNLIMITED, stderr=stderr)
