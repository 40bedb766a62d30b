"""Commands print each cell of their tables whole in a terminal of 80 columns; see also test_table.py."""

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


@pytest.mark.parametrize("command", COMMANDS)
def test_every_cell_is_whole(command: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    tables, draw = list[Table](), Table.__rich_console__
    monkeypatch.setattr(Table, "__rich_console__", lambda table, *rest: (tables.append(table), draw(table, *rest))[1])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.chdir(place)
    assert main([*command.split(), *COMMANDS[command]]) == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()  # without codes for bold
    assert tables
    assert "…" not in "".join(lines).replace(" … ", "")  # as in intervals
    numbers = [cell for table in tables for row in table.rows for n, cell in enumerate(row) if n not in table.left]
    for text in (text for cell in numbers for text in cell.split("\n")):
        assert any(re.search(rf"(?<![\d.,]){re.escape(text)}(?![\d.,]*\d)", line) for line in lines), text
    assert all(len(line) <= COLUMNS for line in lines if "─" in line)
