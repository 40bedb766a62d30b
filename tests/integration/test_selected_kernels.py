"""What `backend: auto` selects in a run: told in the record, kept if all was tried, used on resume."""

import json
from pathlib import Path

import pytest
import torch

from anlit import load_checkpoint
from anlit.attention.selection import Selection
from anlit.models import kernel_selection
from tests.integration.conftest import Train, fit_arguments, last_checkpoint, run
from tests.integration.ranks import DDP, FSDP

SHORT = ("--trainer.max_steps=6", "--model.attention=ScaleInvariant")


def recorded(run_dir: Path) -> dict:
    (selection,) = json.loads((run_dir / "run.json").read_text())["attention"]["made"]
    return selection


def saved(run_dir: Path) -> dict:
    return last_checkpoint(run_dir)["anlit"]["attention"]


def won_by(monkeypatch, name: str, **failed: str) -> None:
    """Let this CPU have candidates as a GPU has, and trials from now on end so."""
    monkeypatch.setattr(kernel_selection, "FEWEST_BATCHES", 0)
    monkeypatch.setattr(kernel_selection, "candidates", lambda *_: ["blockwise", "eager"])
    made = lambda trials, device: [Selection(t.spec, name, {name: 1.0}, {}, failed) for t in trials]  # noqa: E731
    monkeypatch.setattr(kernel_selection, "run_trials", made)


@pytest.mark.parametrize("strategy", [
    [], *(pytest.param(s, marks=pytest.mark.slow) for s in (DDP, FSDP))], ids=["one", "ddp", "fsdp"])  # fmt: skip
def test_on_a_cpu_the_default_is_recorded_and_no_checkpoint_needs_it(
    trained: Train, strategy: list[str]
) -> None:
    """Ranks agree on replicated and on sharded coefficients."""
    run_dir = trained(
        *SHORT, "--model.attention.learned=globally", *strategy, n_ranks=2 if strategy else 1
    )
    assert recorded(run_dir)["backend"] == "blockwise"
    assert recorded(run_dir)["spec"]["mechanism"] == "ScaleInvariant(decay globally)"
    assert saved(run_dir) is None


def test_a_run_goes_on_with_what_the_checkpoint_names_which_is_nothing_while_a_candidate_fails(
    shards: Path, tmp_path: Path, monkeypatch
) -> None:
    run_dir, failed = tmp_path / "run", {"blockwise": "it fails: CUDA out of memory"}
    for steps, best, failures in ((6, "eager", failed), (8, "eager", {}), (10, "blockwise", {})):
        won_by(monkeypatch, best, **failures)
        assert (
            run(
                fit_arguments(
                    shards, run_dir, *SHORT, f"--trainer.max_steps={steps}", "--ckpt_path=last"
                )
            )
            == 0
        )
        assert recorded(run_dir)["backend"] == "eager"
        assert recorded(run_dir)["failed"] == failures
        if failures:
            assert saved(run_dir) is None
            assert load_checkpoint(str(run_dir)).model.selections is None
        else:
            assert saved(run_dir)["made"] == [recorded(run_dir)]
    model = load_checkpoint(str(run_dir)).model
    with torch.no_grad():
        model(torch.zeros(1, 20, dtype=torch.int64))
    assert {*model.model.blocks[0].attention._backends.values()} == {"eager"}
