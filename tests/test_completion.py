"""The completion script is one that the shell takes, and it completes commands and options."""

import shlex
import subprocess
from pathlib import Path

import pytest

from anlit.cli import COMMANDS, main

COMPLETE = """
source {script}
COMP_WORDS=({words}); COMP_CWORD={at}; _shtab_anlit; echo "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    pytest.importorskip("shtab", reason="shtab is not installed: make extras EXTRAS=completion")
    file = tmp_path_factory.mktemp("completion") / "anlit.bash"
    with pytest.MonkeyPatch.context() as patch, file.open("w") as out:
        patch.setattr("sys.stdout", out)
        assert main(["--print_completion", "bash"]) == 0
    return file


def completed(script: Path, *words: str) -> list[str]:
    program = COMPLETE.format(script=script, words=shlex.join(words), at=len(words) - 1)
    return subprocess.check_output(["bash", "-c", program], text=True).split()


def test_bash_takes_the_script_and_completes_commands(script: Path) -> None:
    assert set(completed(script, "anlit", "")) >= set(COMMANDS)
    assert completed(script, "anlit", "di") == ["diagnose"]
    assert "attention" in completed(script, "anlit", "benchmark", "a")
    assert completed(script, "anlit", "score", "run", "--ba") == ["--batch_size"]


def test_an_unknown_shell_is_named(script: Path, refusal) -> None:
    said = refusal("--print_completion", "dos")
    assert "--print_completion dos is not known: choose one of bash, zsh, tcsh" in said
