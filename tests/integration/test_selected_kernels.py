"""What `backend: auto` selects in a run: told in the record, kept if all was tried, used on resume."""

import json
from pathlib import Path

import pytest
import torch

from anlit import load_checkpoint
from anlit.attention import trial
from anlit.attention.backends import BACKENDS
from anlit.attention.selection import Selection
from anlit.models import kernel_selection
from tests.integration.conftest import assert_same_training_state, fit_arguments, last_checkpoint, run
from tests.integration.ranks import DDP, FSDP, run_ranks

QUIET = ("--trainer.max_steps=6", "--checkpoint_every_n_steps=3", "--trainer.val_check_interval=3")


def fit(shards: Path, run_dir: Path, *extra: str, code: int = 0) -> None:
    assert run(fit_arguments(shards, run_dir, *QUIET, "--model.attention=ScaleInvariant", *extra)) == code


def recorded(run_dir: Path) -> dict:
    (selection,) = json.loads((run_dir / "run.json").read_text())["attention"]["made"]
    return selection


def won_by(monkeypatch: pytest.MonkeyPatch, name: str, **failed: str) -> None:
    """Let this CPU have candidates as a GPU has, and trials from now on end so."""
    monkeypatch.setattr(kernel_selection, "FEWEST_BATCHES", 0)
    monkeypatch.setattr(kernel_selection, "candidates", lambda *_: {n: BACKENDS[n] for n in ("blockwise", "eager")})
    monkeypatch.setattr(
        trial, "run_trials", lambda trials, device: [Selection(t.spec, name, {name: 1.0}, {}, failed) for t in trials]
    )


def test_on_a_cpu_the_default_is_recorded_and_no_checkpoint_needs_it(shards: Path, tmp_path: Path) -> None:
    fit(shards, tmp_path / "run")
    assert recorded(tmp_path / "run")["backend"] == "blockwise"
    assert last_checkpoint(tmp_path / "run")["anlit"]["attention"] is None


def test_a_resumed_run_and_a_loaded_model_go_on_with_what_the_checkpoint_names(
    shards: Path, tmp_path: Path, monkeypatch
) -> None:
    won_by(monkeypatch, "eager")
    fit(shards, tmp_path / "whole")
    stop = ("--trainer.callbacks+=tests.integration.callbacks.SignalAt", "--trainer.callbacks.batch=3")
    fit(shards, tmp_path / "cut", *stop, code=1)
    (saved,) = last_checkpoint(tmp_path / "cut")["anlit"]["attention"]["made"]
    assert saved == recorded(tmp_path / "cut")
    assert saved["backend"] == "eager"
    won_by(monkeypatch, "blockwise")
    model = load_checkpoint(str(tmp_path / "cut")).model
    with torch.no_grad():
        model(torch.zeros(1, 20, dtype=torch.int64))
    assert {*model.model.blocks[0].attention._backends.values()} == {"eager"}
    fit(shards, tmp_path / "cut", "--ckpt_path=last")
    assert recorded(tmp_path / "cut")["backend"] == "eager"
    assert_same_training_state(last_checkpoint(tmp_path / "whole"), last_checkpoint(tmp_path / "cut"))


def test_with_a_failed_candidate_nothing_is_saved(shards: Path, tmp_path: Path, monkeypatch) -> None:
    won_by(monkeypatch, "eager", blockwise="it fails: CUDA out of memory")
    fit(shards, tmp_path / "run")
    assert recorded(tmp_path / "run")["failed"] == {"blockwise": "it fails: CUDA out of memory"}
    assert last_checkpoint(tmp_path / "run")["anlit"]["attention"] is None
    assert load_checkpoint(str(tmp_path / "run")).model.selections is None


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_ranks_agree_on_replicated_and_sharded_coefficients(shards: Path, tmp_path: Path, strategy: list[str]) -> None:
    learned = ("--model.attention=ScaleInvariant", "--model.attention.learned=globally")
    arguments = fit_arguments(shards, tmp_path / "run", *QUIET, *learned, *strategy)
    assert run_ranks(arguments, 2) == [0, 0]
    assert recorded(tmp_path / "run")["spec"]["mechanism"] == "ScaleInvariant(decay globally)"
    assert recorded(tmp_path / "run")["backend"] == "blockwise"
