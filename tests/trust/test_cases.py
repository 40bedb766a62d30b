"""Foreign and damaged files of which no other folder has a test: nothing foreign runs, and one sentence says why."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import anlit
from anlit.cli import main
from tests.checkpoints.conftest import trained_run
from tests.checkpoints.foreign import as_run
from tests.data.layouts import documents
from tests.data.preparing import write_texts

__all__ = ["trained_run"]
FILES = {file: file.read_text(encoding="utf-8") for file in Path(anlit.__file__).parent.rglob("*.py")}
RESTRICTED = re.compile(r"torch\.load\([^()]*(\([^()]*\)[^()]*)*weights_only=True")


@pytest.mark.parametrize("call", ["pickle.load", "Unpickler", "FileSystemReader"])
def test_nothing_in_the_package_unpickles(call: str) -> None:
    assert [str(file) for file, text in FILES.items() if call in text] == []


def test_torch_load_takes_tensors_and_plain_values_alone() -> None:
    for file, text in FILES.items():
        assert text.count("torch.load(") == len(RESTRICTED.findall(text)), file


def test_a_tag_for_python_in_a_config_makes_nothing(trained_run: Path, tmp_path: Path, capsys) -> None:
    copy, marker = as_run(trained_run, tmp_path, {}), tmp_path / "marker"
    config = copy / "config.yaml"
    config.write_text(f"x: !!python/object/apply:os.system ['mkdir {marker}']\n{config.read_text()}")
    assert main(["validate", f"--config={config}"]) == 2
    assert "config.yaml cannot be read (could not determine a constructor" in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.slow
def test_prepare_with_threads_of_the_tokenizers_library(tmp_path: Path) -> None:
    """A process of its own, because the tokenizer is trained with threads before the workers are forked."""
    write_texts(tmp_path / "texts", list(documents(40, seed=1)) * 3)
    given = ["--source", tmp_path / "texts", "--output", tmp_path / "out", "--vocab_size", "600", "--workers", "2"]
    command = [sys.executable, "-m", "anlit", "prepare", "TextFiles", *map(str, given)]
    place = {"PYTHONPATH": str(Path(__file__).parents[2]), "TOKENIZERS_PARALLELISM": "true"}
    assert subprocess.run(command, env={**os.environ, **place}, timeout=300).returncode == 0
    assert (tmp_path / "out" / "manifest.json").is_file()
