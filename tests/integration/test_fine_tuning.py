"""Fine-tuning on needles from a trained run's weights, as configs/experiment/needle.yaml has it; also resumed."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from tests.integration.conftest import assert_same_training_state, fit_arguments, last_checkpoint, run

NEEDLE = Path(__file__).parents[2] / "configs" / "experiment" / "needle.yaml"


@pytest.fixture(scope="module")
def trained(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert run(fit_arguments(shards, folder, "--trainer.max_steps=3", "--model.context_length=150", model="GPT")) == 0
    return folder


def tuning(trained: Path, run_dir: Path, *extra: str) -> list[str]:
    return [
        "fit", f"--config={trained}/config.yaml", f"--config={NEEDLE}", f"--run_dir={run_dir}",
        "--trainer.max_steps=6", "--trainer.val_check_interval=3", "--data.val_samples=4",
        f"--initial_weights={trained}/checkpoints/last.ckpt", *extra,
    ]  # fmt: skip


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return last_checkpoint(folder)["state_dict"]


def test_it_starts_from_the_weights_and_resumes_exactly(trained: Path, tmp_path: Path) -> None:
    whole, cut, still = tmp_path / "whole", tmp_path / "cut", tmp_path / "still"
    assert run(tuning(trained, whole)) == 0
    config = yaml.safe_load((whole / "config.yaml").read_text())
    assert config["data"]["class_path"] == "anlit.NeedleInHaystack"
    assert config["initial_weights"] == f"{trained}/checkpoints/last.ckpt"
    assert config["model"]["init_args"]["optimizer"]["init_args"]["lr"] == 2e-5
    assert config["model"]["init_args"]["context_length"] == 150
    record = json.loads((whole / "run.json").read_text())
    assert record["data"]["task"] == "NeedleInHaystack"
    assert last_checkpoint(whole)["optimizer_states"][0]["state"][0]["step"] == 6

    assert run(tuning(trained, still, "--trainer.max_steps=1", "--model.optimizer.lr=0")) == 0
    before, after = weights(trained), weights(still)
    assert all(torch.equal(before[name], after[name]) for name in before)

    # With ckpt_path last the weights are read where the run begins, and not again where it goes on.
    assert run(tuning(trained, cut, "--ckpt_path=last", "--trainer.max_steps=3")) == 0
    assert run(tuning(trained, cut, "--ckpt_path=last", "--initial_weights=gone.ckpt")) == 0
    assert last_checkpoint(cut)["global_step"] == 6
    assert_same_training_state(last_checkpoint(whole), last_checkpoint(cut))


def test_two_sources_of_weights_are_refused(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tuning(trained, tmp_path / "run", f"--ckpt_path={trained}/checkpoints/last.ckpt")) == 2
    assert "both name weights" in capfd.readouterr().err
