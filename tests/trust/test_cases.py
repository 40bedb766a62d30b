"""Foreign and damaged files of which no other folder has a test: nothing foreign runs, and one sentence says why."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import anlit
from anlit.cli import main
from tests.checkpoints.conftest import trained_run
from tests.checkpoints.foreign import RunsCode, as_run, change_json
from tests.data.layouts import documents
from tests.data.preparing import train_tokenizer, write_texts

__all__ = ["trained_run"]
FILES = {file: file.read_text(encoding="utf-8") for file in Path(anlit.__file__).parent.rglob("*.py")}
RESTRICTED = re.compile(r"torch\.load\([^()]*(\([^()]*\)[^()]*)*weights_only=True")


@pytest.mark.parametrize("call", ["pickle.load", "Unpickler", "FileSystemReader"])
def test_nothing_in_the_package_unpickles(call: str) -> None:
    assert [str(file) for file, text in FILES.items() if call in text] == []


def test_torch_load_takes_tensors_and_plain_values_alone() -> None:
    for file, text in FILES.items():
        assert text.count("torch.load(") == len(RESTRICTED.findall(text)), file


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a refused command prints: one sentence."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("anlit: error: ")]
    assert len(errors) == 1
    return errors[0]


def test_a_tag_for_python_in_a_config_makes_nothing(trained_run: Path, tmp_path: Path, capsys) -> None:
    copy, marker = as_run(trained_run, tmp_path, {}), tmp_path / "marker"
    config = copy / "config.yaml"
    config.write_text(f"x: !!python/object/apply:os.system ['mkdir {marker}']\n{config.read_text()}")
    assert "config.yaml cannot be read (could not determine a constructor" in said(
        capsys, "validate", f"--config={config}"
    )
    assert not marker.exists()


def test_a_pickle_is_no_tokenizer(trained_run: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(pickle.dumps(RunsCode(tmp_path / "marker")))
    assert "is not a tokenizer.json that" in said(capsys, "generate", trained_run, "the cat", "--tokenizer", file)
    assert not (tmp_path / "marker").exists()


def test_an_end_of_a_document_that_a_text_may_contain_is_refused(tmp_path: Path, capsys) -> None:
    tokenizer = train_tokenizer(tmp_path / "tokenizer.json", 500)
    change_json(tokenizer, lambda content: content["added_tokens"][0].update(special=False))
    write_texts(tmp_path / "texts", list(documents(10, seed=1)))
    given = ["TextFiles", "--source", tmp_path / "texts", "--output", tmp_path / "out", "--tokenizer", tokenizer]
    assert 'inside of a text for the end of a document: set "special": true' in said(capsys, "prepare", *given)
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.slow
def test_prepare_with_threads_of_the_tokenizers_library(tmp_path: Path) -> None:
    """A process of its own, because the tokenizer is trained with threads before the workers are forked."""
    write_texts(tmp_path / "texts", list(documents(40, seed=1)) * 3)
    given = ["--source", tmp_path / "texts", "--output", tmp_path / "out", "--vocab_size", "600", "--workers", "2"]
    command = [sys.executable, "-m", "anlit", "prepare", "TextFiles", *map(str, given)]
    place = {"PYTHONPATH": str(Path(__file__).parents[2]), "TOKENIZERS_PARALLELISM": "true"}
    assert subprocess.run(command, env={**os.environ, **place}, timeout=300).returncode == 0
    assert (tmp_path / "out" / "manifest.json").is_file()
