"""A table loses no character, however narrow the terminal is, and is not wrapped in a pipe."""

import io
import re

import pytest
from rich.console import Console

from anlit.reporting.table import UNLIMITED, terminal_table

HEAD = ["configuration", "seeds", *(f"speed-up in tokens\n(95 % interval) {n}" for n in range(6))]
ROWS = [[f"anGPT, scale-invariant, number {n}", "3", *(f"1,234.567{n}{k} ± 0.0{k}" for k in range(6))] for n in (1, 2)]


def printed(width: int, head: list[str] = HEAD, rows: list[list[str]] = ROWS, **settings) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(terminal_table("A title", head, rows, **settings))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("names", [1, 2])
@pytest.mark.parametrize("n_columns", [3, 5, 8])
def test_every_number_is_there_whole(n_columns: int, names: int) -> None:
    rows = [row[:n_columns] for row in ROWS]
    for width in [*range(20, 190, 5), UNLIMITED]:
        lines = printed(width, HEAD[:n_columns], rows, names=names)
        assert max(map(len, lines)) <= width
        assert "…" not in "".join(lines)
        cells = [cell for row in rows for cell in row[2:]]
        for cell in cells if width >= 60 else " ".join(cells).split():  # blocks wrap between words
            assert any(re.search(rf"(?<![\d.]){re.escape(cell)}(?![\d.])", line) for line in lines), (width, cell)


def test_one_table_where_there_is_room_and_several_where_not() -> None:
    assert sum("seeds" in line for line in printed(UNLIMITED, names=2)) == 1
    assert sum("seeds" in line for line in printed(80, names=2)) > 1
    assert sum("seeds: 3" in line for line in printed(20, names=2)) == len(ROWS)


def test_the_rules_go_before_the_table_is_split() -> None:
    rows = [[f"name {n}", *["1,234.5"] * 7] for n in range(2)]
    head = ["model", *["GB"] * 7]
    wide, tight = printed(84, head, rows), printed(70, head, rows)
    assert any("│" in line for line in wide)
    assert not any("│" in line for line in tight)
    assert sum("model" in line for line in tight) == 1
