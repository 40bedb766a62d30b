"""`anlit study` reads every run's configuration before the first run starts, without training."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from anlit.cli import main

COMMON = {
    "model": {"init_args": {"vocab_size": 64, "context_length": 16, "n_layers": 1, "n_heads": 2, "d_model": 32}},
    "data": {"class_path": "anlit.TokenShards", "init_args": {"path": "nowhere"}},
}
RATE = "model.init_args.optimizer.init_args.lr"


def write(folder: Path, **changes: Any) -> list[str]:
    """A study of two arms; the command that looks at it."""
    (folder / "gpt.yaml").write_text(yaml.safe_dump({"model": {"class_path": "anlit.GPT"}}))
    (folder / "angpt.yaml").write_text(yaml.safe_dump({"model": {"class_path": "anlit.AnGPT"}}))
    (folder / "common.yaml").write_text(yaml.safe_dump(COMMON))
    arms = {name: {"configs": [f"{name}.yaml"], "tune": {RATE: [0.001, 0.002]}} for name in ("gpt", "angpt")}
    arms["angpt"] |= changes
    study = {"arms": arms, "baseline": "gpt", "shared": {"configs": ["common.yaml"]}, "seeds": [1, 2]}
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    return ["study", "--config", "study.yaml", "--output", "out", "--dry_run"]


def test_a_run_that_fit_would_refuse_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """mistakes.py has other settings."""
    monkeypatch.chdir(tmp_path)
    command = write(tmp_path, tune={RATE: [0.001, "high"]})
    for words in (command, command[:-1]):  # with --dry_run, and as a real start
        assert main(words) == 2
        (error,) = capsys.readouterr().err.strip().splitlines()
        assert all(part in error for part in ("arm 'angpt', study.yaml: ", "lr=high", "a number"))
    assert not (tmp_path / "out").exists()


def test_a_right_study_passes_and_slurms_options_may_stand_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = write(tmp_path)
    assert main([*command, "--slurm", "--gpus-per-node=1 --ntasks-per-node=1"]) == 0
    assert "tuning: 4 runs" in capsys.readouterr().out
    assert main([*command[:-1], "--slurm", "--gpus-per-node=1", "--jobs", "many"]) == 2
    assert "--jobs many is of the wrong type" in capsys.readouterr().err
