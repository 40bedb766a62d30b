"""What `backend: auto` chooses in a run: told in the record and the checkpoint, kept on resume, found again at once."""

import json
from pathlib import Path

import pytest
import torch

from anlit import load_checkpoint
from anlit.attention.choice import choose, trial
from anlit.attention.choice.trial import Outcome, Request
from tests.integration.conftest import assert_same_training_state, fit_arguments, last_checkpoint, logged, run
from tests.integration.ranks import DDP, FSDP, run_ranks

QUIET = ("--trainer.max_steps=6", "--checkpoint_every_n_steps=3", "--trainer.val_check_interval=3")


@pytest.fixture(autouse=True)
def short_runs_are_worth_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "SHARE", 100.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def chosen(run_dir: Path) -> list[str]:
    """What run.json says, which is what the checkpoint says too."""
    table = json.loads((run_dir / "run.json").read_text())["attention"]
    assert table == json.loads(json.dumps(last_checkpoint(run_dir)["anlit"]["attention"]))
    return [kind["backend"] for kind in table["kinds"]]


def fit(shards: Path, run_dir: Path, *extra: str, code: int = 0) -> None:
    assert run(fit_arguments(shards, run_dir, *QUIET, "--model.attention=ScaleInvariant", *extra)) == code


def won_by(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the trials of runs from now on end so."""

    def run_trial(request: Request, able: dict, say=None) -> Outcome:
        return Outcome({each: 1.0 if each == name else 2.0 for each in able})

    monkeypatch.setattr(trial, "run", run_trial)


def test_a_first_and_a_cached_start_are_the_same_run(shards: Path, tmp_path: Path, monkeypatch) -> None:
    fit(shards, tmp_path / "first")  # by a real trial
    taken = chosen(tmp_path / "first")
    won_by(monkeypatch, "eager" if taken == ["blockwise"] else "blockwise")
    fit(shards, tmp_path / "cached")
    assert chosen(tmp_path / "cached") == taken
    first, cached = (logged(tmp_path / name, "train/loss") for name in ("first", "cached"))
    assert len(first) == 6
    assert first == cached
    assert_same_training_state(last_checkpoint(tmp_path / "first"), last_checkpoint(tmp_path / "cached"))


def test_a_resumed_run_and_a_loaded_model_go_on_with_what_the_checkpoint_names(
    shards: Path, tmp_path: Path, monkeypatch
) -> None:
    won_by(monkeypatch, "eager")
    fit(shards, tmp_path / "whole")
    stop = ("--trainer.callbacks+=tests.integration.callbacks.SignalAt", "--trainer.callbacks.batch=3")
    fit(shards, tmp_path / "cut", *stop, code=1)
    assert chosen(tmp_path / "cut") == ["eager"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    won_by(monkeypatch, "blockwise")
    model = load_checkpoint(str(tmp_path / "cut")).model
    with torch.no_grad():
        model(torch.zeros(1, 20, dtype=torch.int64))
    assert {*model.model.blocks[0].attention._chosen.values()} == {"eager"}
    fit(shards, tmp_path / "cut", "--ckpt_path=last")
    assert chosen(tmp_path / "cut") == ["eager"]
    assert_same_training_state(last_checkpoint(tmp_path / "whole"), last_checkpoint(tmp_path / "cut"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_sharded_and_replicated_coefficients_are_tried_on_the_first_rank(
    shards: Path, tmp_path: Path, strategy: list[str]
) -> None:
    learned = ("--model.attention=ScaleInvariant", "--model.attention.learned=globally")
    arguments = fit_arguments(shards, tmp_path / "run", *QUIET, *learned, *strategy)
    assert run_ranks(arguments, 2) == [0, 0]
    (kind,) = json.loads((tmp_path / "run" / "run.json").read_text())["attention"]["kinds"]
    assert kind["mechanism"] == "ScaleInvariant(decay globally)"
    assert kind["seconds"].keys() == {"blockwise", "eager"}
    assert kind["left_out"] == {}
