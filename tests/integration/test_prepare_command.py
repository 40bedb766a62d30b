"""`anlit prepare` as users meet it, and from text files to the first training steps."""

import subprocess
import sys
from pathlib import Path

import pytest

from anlit.cli import main
from anlit.commands.prepare import parser, recipe_options
from anlit.data.preparation import executors
from tests.data import layouts
from tests.data.layouts import documents
from tests.data.preparing import train_tokenizer
from tests.data.reader import all_texts, flip, hashes, read_json
from tests.integration.conftest import fit_arguments, last_checkpoint
from tests.integration.conftest import run as run_command
from tests.integration.run_files import logged

TEXTS = [text for text in documents(50, seed=11) if len(text) < 10_000]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    return str(train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))


def test_the_result_is_said_verified_and_made_again_by_the_manifest_s_command(
    tokenizer: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    layouts.openwebtext(tmp_path / "hub", TEXTS)
    monkeypatch.chdir(tmp_path)
    command = ["prepare", "OpenWebText", "--output", "my out", "--source", "hub"]
    command += ["--tokenizer", tokenizer, "--val_fraction", "0.2"]
    command += ["--on_bad", "skip", "--workers", "1"]
    folder = tmp_path / "my out"

    assert main(command) == 0

    manifest = read_json(folder / "manifest.json")
    finished = hashes(folder)
    train_tokens = f"{manifest['train']['tokens']:,} tokens in train"
    val_tokens = f"{manifest['val']['tokens']:,} tokens in val"
    summary = f"{train_tokens}, {val_tokens}; {manifest['documents']:,} documents, 0 skipped."
    assert f"my out: {summary}" in capsys.readouterr().err

    assert main(command) == 0

    assert "my out is finished, with" in capsys.readouterr().err

    chunk = next((folder / "train").glob("chunk-*.bin"))
    flip(chunk)
    assert main([*command, "--verify"]) == 0

    assert f"{chunk.name} is damaged (its CRC-32" in capsys.readouterr().err
    assert hashes(folder) == finished

    folder.rename(tmp_path / "first")
    manifest_command = f"{sys.executable} -m {manifest['command']}"
    subprocess.run(manifest_command, shell=True, cwd=tmp_path, check=True, capture_output=True)

    assert hashes(folder) == finished


def assert_fits(folder: Path, run_dir: Path, vocab_size: int, *arguments: str) -> None:
    """Two steps and a complete validation; the run's record has the counts of the manifest."""
    options = [
        f"--model.vocab_size={vocab_size}",
        *arguments,
        "--data.batch_size=4",
        "--trainer.max_steps=2",
        "--trainer.val_check_interval=2",
        "--trainer.limit_val_batches=1.0",
    ]

    assert run_command(fit_arguments(folder, run_dir, *options, model="GPT")) == 0

    assert last_checkpoint(run_dir)["global_step"] == 2
    record = read_json(run_dir / "run.json")["data"]
    manifest = read_json(folder / "manifest.json")
    for key in ("documents", "bytes", "tokens", "train", "val", "content_sha256"):
        assert record[key] == manifest[key]
    assert float(logged(run_dir, "val/loss")[-1][1]) > 0
    assert bool(logged(run_dir, "val/bits_per_byte")) == (manifest["bytes"] is not None)


def test_from_text_files_to_training(tmp_path: Path, monkeypatch) -> None:
    """The folder that training prepares is the same as the command's, by the same defaults."""
    source = str(layouts.text_files(tmp_path / "text", TEXTS))
    folder = tmp_path / "out"
    assert_fits(
        folder,
        tmp_path / "run",
        300,
        "--data=TextFiles",
        f"--data.source={source}",
        f"--data.path={folder}",
        "--data.vocab_size=300",
        "--data.val_fraction=0.2",
    )
    expected = {*TEXTS} - {"\ufeff"}  # a byte-order mark alone is an empty text
    assert all_texts(folder) == sorted(expected)

    monkeypatch.setattr(executors, "encode_task", None)  # nothing is made again
    command = ["prepare", "TextFiles", "--source", source, "--output", str(folder)]
    assert main([*command, "--val_fraction", "0.2", "--vocab_size", "300"]) == 0


def test_options_that_are_not_typed_are_left_to_the_recipe() -> None:
    arguments = parser().parse_args(["TextFiles"])

    assert set(recipe_options(arguments).values()) == {None}


def test_a_large_share_that_is_held_out_is_said(tmp_path: Path, capfd) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"the {name} cat sat on the mat. " * 50)
    command = ["prepare", "TextFiles", "--source", str(tmp_path), "--vocab_size", "260"]

    assert main([*command, "--output", str(tmp_path / "out")]) == 0

    expected = "val has 50% of the tokens, because documents are held out whole"
    assert expected in capfd.readouterr().err
