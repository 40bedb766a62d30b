"""A table loses no character, however narrow the terminal is, and is not wrapped in a pipe."""

import io
import re

import pytest
from rich.console import Console

from anlit.reporting.table import UNLIMITED, Table

HEAD = ["configuration", "seeds", *(f"speed-up in tokens\n(95 % interval) {n}" for n in range(6))]
ROWS = [[f"anGPT, scale-invariant, number {n}", "3", *(f"1,234.567{n}{k} ± 0.0{k}" for k in range(6))] for n in (1, 2)]


def printed(width: int, head: list[str] = HEAD, rows: list[list[str]] = ROWS) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(Table("A title", head, rows))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("n_columns", [3, 5, 8])
def test_every_number_is_there_whole(n_columns: int) -> None:
    rows = [row[:n_columns] for row in ROWS]
    for width in [*range(20, 190, 5), UNLIMITED]:
        lines = printed(width, HEAD[:n_columns], rows)
        assert max(map(len, lines)) <= width
        assert "…" not in "".join(lines)
        cells = [cell for row in rows for cell in row[2:]]
        for cell in cells if width >= 60 else " ".join(cells).split():  # blocks wrap between words
            assert any(re.search(rf"(?<![\d.]){re.escape(cell)}(?![\d.])", line) for line in lines), (width, cell)


def test_a_table_where_there_is_room_and_else_a_block_for_each_row() -> None:
    wide, narrow = printed(UNLIMITED), printed(80)
    assert sum("─" in line for line in wide) == 1
    assert sum("seeds" in line for line in wide) == 1
    assert not any("─" in line for line in narrow)
    assert sum("seeds: 3" in line for line in narrow) == len(ROWS)
    assert [line.strip() for line in narrow][:2] == ["A title", ""]
