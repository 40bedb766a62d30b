"""Commands print each cell of their tables whole, in a terminal of 80 columns and in a pipe; see also test_table.py."""

import re
import sys
from pathlib import Path

import pytest

from anlit.cli import main
from anlit.reporting.table import Table
from tests.checkpoints.foreign import trained

pytestmark = pytest.mark.slow
COLUMNS = 80
COMMANDS = {
    "size": ["--config", "run/config.yaml"],
    "compare": ["run", "--baseline", "run", "--output", "out"],
    "lengths": ["run", "--lengths", "8,16,32,64,128,256", "--output", "out"],
    "diagnose": ["run", "--lengths", "16", "--tokens", "64", "--output", "out"],
    "diagnose --gaussian": ["--lengths", "10,100", "--draws", "4", "--output", "out"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("tables"), "AnGPT").parent


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[Table]:
    """Those that a command prints."""
    printed: list[Table] = []
    draw = Table.__rich_console__
    monkeypatch.setattr(Table, "__rich_console__", lambda table, *rest: (printed.append(table), draw(table, *rest))[1])
    return printed


@pytest.mark.parametrize(
    ("command", "is_pipe"), [*((command, False) for command in COMMANDS), ("size", True), ("compare", True)]
)
def test_every_cell_is_whole(
    command: str, is_pipe: bool, place: Path, tables: list[Table], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: not is_pipe)
    assert main([*command.split(), *COMMANDS[command]]) == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()  # without codes for bold
    assert tables
    assert "…" not in "".join(lines).replace(" … ", "")  # as in intervals
    numbers = [cell for table in tables for row in table.rows for n, cell in enumerate(row) if n not in table.left]
    for text in (text for cell in numbers for text in cell.split("\n")):
        assert any(re.search(rf"(?<![\d.,]){re.escape(text)}(?![\d.,]*\d)", line) for line in lines), text
    if is_pipe:
        for table in tables:
            assert any(all(word in line for word in table.rows[0][0].split()) for line in lines)
    else:
        assert all(len(line) <= COLUMNS for line in lines if "─" in line)
