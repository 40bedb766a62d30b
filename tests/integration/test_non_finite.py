"""A run whose numbers become NaN or infinite ends with an error, and its checkpoints stay good ones."""

import json
from pathlib import Path

import pytest
import torch

from anlit import GPT
from anlit.cli import main
from anlit.errors import UserError
from anlit.training.callbacks import FiniteCheckpoints
from tests.integration.conftest import fit_arguments
from tests.integration.ranks import DDP, FSDP, run_ranks
from tests.models.tiny import fit, tiny


def poisoned(shards: Path, run_dir: Path, step: int, *extra: str) -> list[str]:
    """Validation and checkpoints after steps 5 and 10, counted from 1; `step`, from 0, is spoilt."""
    return fit_arguments(
        shards, run_dir, "--trainer.callbacks+=tests.training.poison.PoisonGradient",
        f"--trainer.callbacks.step={step}", *extra, "--trainer.val_check_interval=5", "--trainer.max_steps=12",
        "--checkpoint_every_n_steps=100",
    )  # fmt: skip


def assert_finite_at(run_dir: Path, step: int) -> None:
    """last.ckpt and best.ckpt are those after `step` steps, and every tensor in them is finite."""
    for name in ("last", "best"):
        content = torch.load(run_dir / "checkpoints" / f"{name}.ckpt", weights_only=True)
        assert content["global_step"] == step
        assert all(bool(torch.isfinite(tensor).all()) for tensor in content["state_dict"].values())


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("step", [9, 11])
@pytest.mark.covering(1)
def test_a_bad_gradient_before_a_checkpoint(
    shards: Path, tmp_path: Path, step: int, value: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before the validation after step 10, or in the last step of the run."""
    run_dir = tmp_path / "run"
    assert main(poisoned(shards, run_dir, step, f"--trainer.callbacks.value=.{value}")) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert f"the gradient became NaN or infinite at step {step + 1}: lower the learning rate" in last
    assert last.endswith(f"the last good checkpoint is {run_dir}/checkpoints/last.ckpt")
    assert_finite_at(run_dir, 5 if step == 9 else 10)
    assert json.loads((run_dir / "run.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("step", [9, pytest.param(11, marks=pytest.mark.slow)])
def test_bad_weights_are_never_written(
    shards: Path, tmp_path: Path, step: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """That no loss or gradient shows: here a callback spoils them, on a device the flags are read later."""
    run_dir = tmp_path / "run"
    assert main(poisoned(shards, run_dir, step, "--trainer.callbacks.spoils_weight=true")) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert f"weights or optimizer state became NaN or infinite by step {step + 1} (1 tensors)" in last
    assert_finite_at(run_dir, 5 if step == 9 else 10)


@pytest.mark.parametrize("clip", [pytest.param("norm", marks=pytest.mark.slow), "value"])
def test_gradients_are_looked_at_however_they_are_clipped(shards: Path, tmp_path: Path, clip: str) -> None:
    assert main(poisoned(shards, tmp_path / "run", 9, f"--trainer.gradient_clip_algorithm={clip}")) == 2
    assert_finite_at(tmp_path / "run", 5)


@pytest.mark.parametrize("strategy", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_ranks_end_together(shards: Path, tmp_path: Path, strategy: list[str]) -> None:
    """One rank's loss is NaN; each would wait in vain for a rank that ended alone."""
    arguments = fit_arguments(
        shards, tmp_path / "run", "--trainer.callbacks+=tests.training.poison.Poison",
        "--trainer.callbacks.batches=[3]", "--trainer.callbacks.rank=1", "--trainer.max_steps=6", *strategy,
    )  # fmt: skip
    assert run_ranks(arguments, 2) == [2, 2]


def test_training_does_not_start_from_bad_weights() -> None:
    model = tiny(GPT)
    with torch.no_grad():
        model.model.head.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="that training starts from are NaN or infinite"):
        fit(model, 1, callbacks=[FiniteCheckpoints()])
