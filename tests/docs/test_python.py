"""The script of docs/python.md runs as printed, and the command line reads its checkpoint."""

import runpy
import shutil
import sysconfig
from pathlib import Path

import pytest

from anlit.cli import main
from tests.docs.pages import ROOT, files


@pytest.mark.slow
def test_the_script_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for number, source in enumerate(sorted((Path(sysconfig.get_path("stdlib")) / "json").glob("*.py"))):
        shutil.copy(source, tmp_path / "texts" / f"{number}.txt")
    for number, source in enumerate(sorted((Path(sysconfig.get_path("stdlib")) / "email").glob("*.py"))):
        shutil.copy(source, tmp_path / "texts" / f"email{number}.txt")
    ((name, content),) = files(ROOT / "docs" / "python.md")
    (tmp_path / name).write_text(content)
    runpy.run_path(name, run_name="__main__")
    assert "loss " in capsys.readouterr().out.splitlines()[-1]
    assert main(["generate", "runs/python-api/best.ckpt", "def", "--max_tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("def")
