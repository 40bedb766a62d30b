"""`anlit prepare` as users meet it, and from text files to the first training steps."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from anlit.cli import main
from anlit.commands.prepare import parser
from anlit.data.preparation import executors
from anlit.data.preparation.recipes import Options
from tests.data import layouts
from tests.data.layouts import documents
from tests.data.preparing import train_tokenizer
from tests.data.reader import flip, hashes, read_json, read_texts
from tests.integration.conftest import fit_arguments, last_checkpoint, logged
from tests.integration.conftest import run as run_command

SHIPPED = Path(__file__).parents[2] / "configs" / "data"
TEXTS = [text for text in documents(50, seed=11) if len(text) < 10_000]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    return str(train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))


def test_what_is_said_verified_and_kept_as_the_command(
    tokenizer: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    """The command in the manifest makes the same folder."""
    layouts.openwebtext(tmp_path / "hub", TEXTS)
    monkeypatch.chdir(tmp_path)
    own = [
        "--output",
        "my out",
        "--source",
        "hub",
        "--tokenizer",
        tokenizer,
        "--val_fraction",
        "0.2",
    ]
    command = ["prepare", "OpenWebText", *own, "--on_bad", "skip", "--workers", "1"]
    assert main(command) == 0
    out, before = tmp_path / "my out", hashes(tmp_path / "my out")
    manifest = read_json(out / "manifest.json")
    counts = f"{manifest['train']['tokens']:,} tokens in train, {manifest['val']['tokens']:,} tokens in val"
    assert (
        f"my out: {counts}; {manifest['documents']:,} documents, 0 skipped."
        in capsys.readouterr().err
    )
    assert main(command) == 0
    assert "my out is finished, with" in capsys.readouterr().err
    chunk = next((out / "train").glob("chunk-*.bin"))
    flip(chunk)
    assert main([*command, "--verify"]) == 0
    assert f"{chunk.name} is damaged (its CRC-32" in capsys.readouterr().err
    assert hashes(out) == before
    out.rename(tmp_path / "first")
    words = f"{sys.executable} -m {manifest['command']}"
    subprocess.run(words, shell=True, cwd=tmp_path, check=True, capture_output=True)
    assert hashes(out) == before


def assert_fits(folder: Path, run_dir: Path, vocab_size: int, *arguments: str) -> None:
    """Two steps and a whole validation; the run's record has the counts of the manifest."""
    steps = [
        "--trainer.max_steps=2",
        "--trainer.val_check_interval=2",
        "--trainer.limit_val_batches=1.0",
    ]
    extra = [f"--model.vocab_size={vocab_size}", *arguments, "--data.batch_size=4", *steps]
    assert run_command(fit_arguments(folder, run_dir, *extra, model="GPT")) == 0
    assert last_checkpoint(run_dir)["global_step"] == 2
    record, manifest = read_json(run_dir / "run.json")["data"], read_json(folder / "manifest.json")
    kept = ("documents", "bytes", "tokens", "train", "val", "content_sha256")
    assert [record[key] for key in kept] == [manifest[key] for key in kept]
    assert float(logged(run_dir, "val/loss")[-1][1]) > 0
    assert bool(logged(run_dir, "val/bits_per_byte")) == (manifest["bytes"] is not None)


def test_from_text_files_to_training(tmp_path: Path, monkeypatch) -> None:
    """The folder that training prepares is the one that the command would make, by the same defaults."""
    source, folder = str(layouts.text_files(tmp_path / "text", TEXTS)), tmp_path / "out"
    arguments = ["--data=TextFiles", f"--data.source={source}", f"--data.path={folder}"]
    assert_fits(
        folder,
        tmp_path / "run",
        300,
        *arguments,
        "--data.vocab_size=300",
        "--data.val_fraction=0.2",
    )
    assert sorted(read_texts(folder, "train") + read_texts(folder, "val")) == sorted(
        {*TEXTS} - {"\ufeff"}
    )  # a mark
    monkeypatch.setattr(executors, "encode_task", None)  # nothing is made again
    own = [
        "--source",
        source,
        "--output",
        str(folder),
        "--val_fraction",
        "0.2",
        "--vocab_size",
        "300",
    ]
    assert main(["prepare", "TextFiles", *own]) == 0
    parsed = parser().parse_args(["TextFiles"])
    assert (
        Options(**{field.name: getattr(parsed, field.name) for field in fields(Options)})
        == Options()
    )


def test_a_large_share_that_is_held_out_is_said(tmp_path: Path, capfd) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"the {name} cat sat on the mat. " * 50)
    out = ["--output", str(tmp_path / "out"), "--vocab_size", "260"]
    assert main(["prepare", "TextFiles", "--source", str(tmp_path), *out]) == 0
    assert (
        "val has 50% of the tokens, because documents are held out whole" in capfd.readouterr().err
    )
