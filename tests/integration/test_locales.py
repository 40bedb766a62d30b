"""Files are in UTF-8 under any locale, and an error is a sentence without a temporary folder."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from anlit.errors import RUN_FOLDER, report_unforeseen
from tests.integration.conftest import fit_arguments

WITHOUT_LOCALE = """
import sys, warnings
warnings.filterwarnings("error", category=EncodingWarning, module="anlit")
from anlit.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""`anlit`, which fails where it opens a file in the locale's encoding."""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_a_run_opens_no_file_in_the_encoding_of_the_locale(shards: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-X", "warn_default_encoding", "-c", WITHOUT_LOCALE]
    arguments = fit_arguments(shards, tmp_path / "run", "--trainer.max_steps=2")

    result = subprocess.run([*command, *arguments], capture_output=True, text=True)

    assert result.returncode == 0, result.stderr


def test_a_configuration_that_the_locale_cannot_read_is_explained(tmp_path: Path) -> None:
    """Python reads UTF-8 in the locale C too, unless its UTF-8 mode is switched off."""
    (tmp_path / "small.yaml").write_text("name: τ\n", encoding="utf-8")

    result = subprocess.run(
        [sys.executable, "-m", "anlit", "fit", "--config", str(tmp_path / "small.yaml")],
        env=os.environ | ASCII,
        capture_output=True,
        text=True,
    )

    assert result.returncode == 2
    assert "a text is not in this system's encoding" in result.stderr
    assert result.stderr.endswith("set PYTHONUTF8=1\n")


@pytest.mark.parametrize(
    "command", ["fit --data=ä", "size --model=ä", "study --config=ä.yaml", "validate ä"]
)
def test_an_argument_that_the_locale_lacks_is_explained(command: str) -> None:
    """Python stands surrogates for its bytes, which no file in UTF-8 can hold."""
    result = subprocess.run(
        [sys.executable, "-m", "anlit", *command.split()],
        env=os.environ | ASCII,
        capture_output=True,
        text=True,
    )

    assert result.returncode == 2
    assert "this system's encoding is ANSI_X3.4-1968, set PYTHONUTF8=1" in result.stderr


def test_an_unforeseen_error_without_a_folder_for_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    RUN_FOLDER.set("")
    monkeypatch.setattr(tempfile, "gettempdir", find_none)
    try:
        raise KeyError("x")
    except KeyError as error:
        sentence = report_unforeseen(error)

    assert sentence.endswith("its traceback could not be written")
