"""`anlit fit` with factors of the rate and a base: logged, kept, continued and annealed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anlit.cli import main
from anlit.training.optim.schedule import Cosine
from tests.integration.conftest import (
    KILLED,
    Train,
    fit_arguments,
    last_checkpoint,
    signal_at,
    stop_and_continue,
)
from tests.integration.ranks import DDP, FSDP, run_ranks
from tests.integration.run_files import column, model_settings_of, record_of, values

STEPS = 12
FLAGS = (
    f"--trainer.max_steps={STEPS}",
    "--trainer.val_check_interval=6",
    "--model.lr_factors.embedding=10",
    "--model.lr_factors.matrices=0.5",
    "--model.base_d_model=16",
    "--model.base_n_layers=1",
    "--trainer.callbacks+=LearningRateMonitor",
)
PEAK = 1e-3
PEAKS = {
    "matrices": PEAK * 0.5 / 2,
    "residual_matrices": PEAK * 0.5 / 2 / 2,
    "embedding": PEAK * 10,
    "head": PEAK / 2,
    "vectors": PEAK,
}
"""Rates of GPT+ at twice the base's width and depth."""


@pytest.fixture(scope="module")
def scaled(trained: Train) -> Path:
    return trained(*FLAGS, model="GPT")


def schedule_at(step: int) -> float:
    return Cosine(warmup=0.2).factor(step, STEPS)


def scheduled(peak: float) -> Any:
    """About the rates of the run's steps."""
    rates = [peak * schedule_at(step) for step in range(STEPS)]
    return pytest.approx(rates)


def test_groups_are_logged_by_name_and_the_rate_before_the_factors_beside_them(
    scaled: Path,
) -> None:
    for name, peak in PEAKS.items():
        assert column(scaled, f"lr-AdamW/{name}") == scheduled(peak), name
    assert column(scaled, "train/learning_rate") == scheduled(PEAK)


def test_the_record_has_the_peak_of_each_group_and_the_settings(scaled: Path) -> None:
    (launch,) = record_of(scaled)["launches"]
    settings = model_settings_of(scaled)
    assert launch["peak_rates"] == pytest.approx(PEAKS)
    assert settings["lr_factors"] == {"embedding": 10.0, "matrices": 0.5}
    assert (settings["base_d_model"], settings["base_n_layers"]) == (16, 1)


def test_a_killed_run_ends_with_the_same_bits(shards: Path, scaled: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    arguments = fit_arguments(shards, cut, *FLAGS, model="GPT")

    stop_and_continue(arguments, cut, scaled, signal_at("SIGKILL", 10), code=KILLED)


def test_a_continued_run_takes_new_factors_and_keeps_its_base(
    shards: Path, scaled: Path, tmp_path: Path, refusal
) -> None:
    arguments = fit_arguments(
        shards, tmp_path / "new", *FLAGS, f"--ckpt_path={scaled / 'checkpoints' / 'best.ckpt'}",
        "--trainer.max_steps=14", model="GPT",
    )  # fmt: skip

    error = refusal(*arguments, "--model.base_d_model=32")
    assert main([*arguments, "--model.lr_factors.embedding=20"]) == 0

    assert "trained with other settings (model.base_d_model 16 → 32)" in error
    groups = last_checkpoint(tmp_path / "new")["optimizer_states"][0]["param_groups"]
    peaks = dict(zip(values(groups, "name"), values(groups, "initial_lr"), strict=True))
    assert peaks == pytest.approx(PEAKS | {"embedding": PEAK * 20})


def test_annealing_lowers_all_groups_alike(scaled: Path, tmp_path: Path) -> None:
    options = ["--anneal=0.5", f"--run_dir={tmp_path}"]
    run = ["fit", "--config", str(scaled / "config.yaml"), "--ckpt_path", str(scaled)]

    assert main([*run, *options]) == 0

    shares = np.array([5, 4, 3, 2, 1, 0]) / 6
    for name, peak in PEAKS.items():
        expected = peak * schedule_at(STEPS - 1) * shares
        assert column(tmp_path, f"lr-AdamW/{name}") == pytest.approx(expected, abs=1e-12), name


@pytest.mark.parametrize("strategy", [DDP, FSDP], ids=["ddp", "fsdp"])
@pytest.mark.slow
def test_two_processes_have_the_same_rates(shards: Path, tmp_path: Path, strategy) -> None:
    arguments = fit_arguments(shards, tmp_path, *FLAGS, *strategy, model="GPT")

    assert run_ranks(arguments, 2) == [0, 0]

    for name, peak in PEAKS.items():
        assert column(tmp_path, f"lr-AdamW/{name}") == scheduled(peak), name


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model.lr_factors.lm_head=2"], "model.lr_factors.lm_head is not a parameter group: "),
        (["--model.lr_factors.head=-2"], "model.lr_factors.head=-2.0 is out of range: give 0 or "),
        (["--model.base_d_model=0"], "model.base_d_model=0 is out of range: give 1 or more"),
        (
            ["--model.base_d_model=16", "--model.optimizer=torch.optim.SGD"],
            "model.base_d_model and base_n_layers have no rule for SGD: choose AdamW or MuonAdamW",
        ),
    ],
)
def test_a_wrong_value_gets_a_sentence(
    shards: Path, tmp_path: Path, refusal, flags: list[str], sentence: str
) -> None:
    assert sentence in refusal(*fit_arguments(shards, tmp_path / "run", *flags, model="GPT"))


def test_the_default_rate_is_the_one_of_the_bases_width(shards: Path, tmp_path: Path) -> None:
    flags = ["--config=model/ngpt.yaml", "--model.d_model=256", "--model.base_d_model=128"]
    arguments = fit_arguments(shards, tmp_path, *flags, "--trainer.max_steps=1", model="NGPT")
    arguments.remove("--model.d_model=32")

    assert main(arguments) == 0

    optimizer = model_settings_of(tmp_path)["optimizer"]
    assert optimizer["init_args"]["lr"] == 1 / 128
