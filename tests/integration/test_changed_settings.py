"""A run that is continued with other settings: what would make another model is refused, what is taken is said."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from anlit.cli import main
from anlit.optim.schedule import Schedule
from tests.integration.conftest import assert_same_training_state, fit_arguments, last_checkpoint, run
from tests.integration.ranks import DDP, FSDP, column, run_ranks

STEPS, LONGER = 12, 20
PARTS = ("--model.attention=Plain", "--model.positions=RoPE")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    assert run(fit_arguments(shards, run_dir, f"--trainer.max_steps={STEPS}", *PARTS)) == 0
    return run_dir


def continued(shards: Path, run_dir: Path, *changed: str) -> list[str]:
    return fit_arguments(shards, run_dir, f"--trainer.max_steps={LONGER}", "--ckpt_path=last", *PARTS, *changed)


def content(run_dir: Path) -> dict[str, bytes]:
    names = ("config.yaml", "run.json", "metrics.csv", "checkpoints/last.ckpt")
    return {name: (run_dir / name).read_bytes() for name in names}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--model.n_heads=4"], "model.n_heads 2 → 4"),
        (["--model.attention=LogN"], "model.attention Plain → LogN"),
        (["--model.positions.base=500"], "model.positions.base 10000.0 → 500.0"),
        (["--model.d_model=64", "--model.n_layers=3"], "model.n_layers 2 → 3, model.d_model 32 → 64"),
        (["--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.1"], "model.optimizer AdamW → SGD"),
        (["--seed_everything=5"], "seed_everything 1 → 5"),
    ],
)
def test_another_model_is_refused_in_one_sentence(
    shards: Path, tmp_path: Path, trained: Path, changed: list[str], said: str, capsys: Capture
) -> None:
    run_dir = shutil.copytree(trained, tmp_path / "run")
    before = content(run_dir)
    capsys.readouterr()
    assert main(continued(shards, run_dir, *changed)) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1
    assert f"was trained with other settings ({said})" in errors[0]
    assert "--accept_changes true" in errors[0]
    assert content(run_dir) == before


def test_weights_that_do_not_fit_are_refused_even_if_accepted(
    shards: Path, tmp_path: Path, trained: Path, capsys: Capture
) -> None:
    run_dir = shutil.copytree(trained, tmp_path / "run")
    assert main(continued(shards, run_dir, "--model.d_model=64", "--accept_changes=true")) == 2
    assert "does not fit the model (" in capsys.readouterr().err


CHANGED = ["--model.optimizer.lr=0.01", "--model.optimizer.weight_decay=0.2", "--model.optimizer.betas=[0.8, 0.9]"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_changed_rates_are_taken_and_said(
    shards: Path, tmp_path: Path, trained: Path, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = shutil.copytree(trained, tmp_path / "run")
    if ranks == 1:
        assert main(continued(shards, run_dir, *CHANGED)) == 0
        (line,) = [message for message in caplog.messages if message.startswith("Continued with changed settings")]
        assert "model.optimizer.lr 0.001 → 0.01" in line
        assert "model.optimizer.betas [0.9, 0.95] → [0.8, 0.9]" in line
        assert "model.optimizer.weight_decay 0.0 → 0.2" in line
        assert f"trainer.max_steps {STEPS} → {LONGER}" in line
    else:
        assert run_ranks(continued(shards, run_dir, *CHANGED, *FSDP), ranks) == [0, 0]
    schedule = Schedule()
    expected = [0.01 * schedule.factor(step, LONGER) for step in range(STEPS, LONGER)]
    assert column(run_dir, "train/learning_rate")[STEPS:] == pytest.approx(expected)
    taken = yaml.safe_load((run_dir / "config.yaml").read_text())["model"]["init_args"]["optimizer"]["init_args"]
    assert (taken["lr"], taken["weight_decay"], taken["betas"]) == (0.01, 0.2, [0.8, 0.9])
    if ranks == 1:
        groups = last_checkpoint(run_dir)["optimizer_states"][0]["param_groups"]
        assert [group["weight_decay"] for group in groups] == [0.2, 0.2, 0.2, 0.0]
        assert {tuple(group["betas"]) for group in groups} == {(0.8, 0.9)}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_another_optimizer_is_taken_when_told(shards: Path, tmp_path: Path, trained: Path, ranks: int) -> None:
    """It begins without a state; weights, step and data go on."""
    run_dir = shutil.copytree(trained, tmp_path / "run")
    sgd = [
        "--model.optimizer=torch.optim.SGD",
        "--model.optimizer.lr=0.1",
        "--model.optimizer.fused=false",
        "--accept_changes=true",
    ]
    assert set(run_ranks(continued(shards, run_dir, *sgd, *(FSDP if ranks > 1 else [])), ranks)) == {0}
    assert len(column(run_dir, "train/loss")) == LONGER
    rate = column(run_dir, "train/learning_rate")[STEPS]
    assert rate == pytest.approx(0.1 * Schedule().factor(STEPS, LONGER))


def test_other_heads_are_taken_when_told(shards: Path, tmp_path: Path, trained: Path) -> None:
    run_dir = shutil.copytree(trained, tmp_path / "run")
    assert main(continued(shards, run_dir, "--model.n_heads=4", "--accept_changes=true")) == 0
    assert last_checkpoint(run_dir)["hyper_parameters"]["n_heads"] == 4


@pytest.mark.slow
def test_every_rank_refuses(shards: Path, tmp_path: Path, trained: Path) -> None:
    for strategy in (DDP, FSDP):
        run_dir = shutil.copytree(trained, tmp_path / strategy[0].rsplit("=", 1)[1])
        assert run_ranks(continued(shards, run_dir, "--model.n_heads=4", *strategy), 2) == [2, 2]


def test_without_a_change_the_continued_run_is_identical(shards: Path, tmp_path: Path) -> None:
    """Setting the rates anew must not change a bit of them."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    callback = ("--trainer.callbacks+=tests.integration.callbacks.SignalAt", "--trainer.callbacks.batch=9")
    warm = ("--model.schedule.warmup=0.3", f"--trainer.max_steps={LONGER}")
    assert run(fit_arguments(shards, whole, *warm)) == 0
    assert run(fit_arguments(shards, cut, *warm, *callback)) == 1
    assert run(fit_arguments(shards, cut, *warm, "--ckpt_path=last")) == 0
    assert_same_training_state(last_checkpoint(whole), last_checkpoint(cut))
    assert torch.equal(*(torch.tensor(column(one, "train/learning_rate")) for one in (whole, cut)))
