"""Weights & Biases, offline: a continued run continues the same run there, and TensorBoard goes on beside it."""

from pathlib import Path

import pytest
import yaml

from anlit.cli import main
from tests.integration.conftest import fit_arguments, run

FRAGMENT = "--config=logger/wandb.yaml"


@pytest.mark.slow
def test_a_continued_run_has_one_id(shards: Path, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: make extras EXTRAS=wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "run"
    for steps, more in ((2, []), (4, ["--ckpt_path=last"])):
        assert run(fit_arguments(shards, folder, FRAGMENT, f"--trainer.max_steps={steps}", *more)) == 0
    parts = list((folder / "wandb").glob("offline-run-*"))
    assert len(parts) == 2
    assert len({part.name.rpartition("-")[2] for part in parts}) == 1
    assert b"train/loss" in b"".join(file.read_bytes() for file in (folder / "wandb").rglob("*.wandb"))
    assert len(list(folder.glob("events.out.tfevents.*"))) == 2
    assert (folder / "metrics.csv").is_file()
    saved = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["logger"]["init_args"]
    assert (saved["id"], saved["save_dir"]) == (None, ".")


def test_without_wandb_the_message_says_how_to_install_it(shards: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(fit_arguments(shards, tmp_path / "run", FRAGMENT)) == 2
    assert "needs wandb: run `make extras EXTRAS=wandb`" in capsys.readouterr().err
