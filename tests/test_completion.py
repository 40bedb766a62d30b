"""The shell accepts the completion script, which completes commands and options."""

import shlex
import subprocess
from pathlib import Path

import pytest

from anlit.cli import COMMANDS, main

COMPLETE = """
source {script}
COMP_WORDS=({command}); COMP_CWORD={position}; _shtab_anlit; echo "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    pytest.importorskip("shtab", reason="shtab is not installed: make extras EXTRAS=completion")
    file = tmp_path_factory.mktemp("completion") / "anlit.bash"
    with pytest.MonkeyPatch.context() as patch, file.open("w") as out:
        patch.setattr("sys.stdout", out)
        assert main(["--print_completion", "bash"]) == 0
    return file


def completed(script: Path, *command: str) -> list[str]:
    """Return the completions of the last argument."""
    position = len(command) - 1
    program = COMPLETE.format(script=script, command=shlex.join(command), position=position)
    return subprocess.check_output(["bash", "-c", program], text=True).split()


def test_bash_accepts_the_script_and_completes_commands(script: Path) -> None:
    assert set(completed(script, "anlit", "")) >= set(COMMANDS)
    assert completed(script, "anlit", "di") == ["diagnose"]
    assert "attention" in completed(script, "anlit", "benchmark", "a")
    assert completed(script, "anlit", "score", "run", "--ba") == ["--batch_size"]


def test_an_unknown_shell_is_named(script: Path, refusal) -> None:
    error = refusal("--print_completion", "dos")

    assert "--print_completion dos is not known: choose one of bash, zsh, tcsh" in error
