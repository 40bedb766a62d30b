"""Every command that prints a table prints each of its cells whole, in a terminal of 80 columns and in a pipe."""

import re
import sys
from pathlib import Path

import pytest

from anlit.cli import main
from anlit.reporting.table import Table
from tests.analysis.study.conftest import Launch, folder, start, write_study
from tests.checkpoints.foreign import trained

__all__ = ["folder", "start"]
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
    found: list[Table] = []
    draw = Table.__rich_console__
    monkeypatch.setattr(Table, "__rich_console__", lambda one, *rest: (found.append(one), draw(one, *rest))[1])
    return found


def assert_whole(tables: list[Table], lines: list[str]) -> None:
    assert tables
    assert "…" not in "".join(lines).replace(" … ", "")  # as in intervals
    for table in tables:
        for row in table.rows:
            for column, cell in enumerate(row):
                for text in cell.split("\n") if column not in table.left else ():
                    whole = rf"(?<![\d.,]){re.escape(text)}(?![\d.,]*\d)"
                    assert any(re.search(whole, line) for line in lines), text


def plain(printed: str) -> list[str]:
    """The lines without the codes for bold."""
    return re.sub(r"\x1b\[[\d;]*m", "", printed).splitlines()


def in_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "is_pipe"), [*((one, False) for one in COMMANDS), ("size", True), ("compare", True)]
)
def test_every_cell_is_whole(
    command: str,
    is_pipe: bool,
    place: Path,
    tables: list[Table],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    if not is_pipe:
        in_terminal(monkeypatch)
    assert main([*command.split(), *COMMANDS[command]]) == 0
    lines = plain(capsys.readouterr().out)
    assert_whole(tables, lines)
    if is_pipe:
        for table in tables:
            assert any(all(word in line for word in table.rows[0][0].split()) for line in lines)
    else:
        assert all(len(line) <= COLUMNS for line in lines if "─" in line)


@pytest.mark.slow
def test_the_table_of_a_study_is_whole(
    folder: Path,
    start: Launch,
    tables: list[Table],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_study(folder)
    assert start().wait() == 0
    in_terminal(monkeypatch)
    assert main(["study", "--config", "study.yaml", "--output", "out", "--report_only"]) == 0
    assert_whole(tables, plain(capsys.readouterr().out))
