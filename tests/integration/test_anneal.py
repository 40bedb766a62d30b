"""`anlit fit --anneal`: a run branched from a checkpoint, whose rate falls to 0."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import Namespace

from anlit.checkpoints.checkpoint_io import read_checkpoint
from anlit.cli import main
from anlit.commands.anneal import default_folder
from tests.integration.conftest import callback, fit_arguments

STABLE = ("--model.schedule=WSD", "--model.schedule.decay=0", "--model.schedule.warmup=0.1")
N_STEPS = 20
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def stable_run(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps at its peak rate."""
    run = tmp_path_factory.mktemp("stable") / "run"
    assert main([*fit_arguments(shards, run, *STABLE, f"--trainer.max_steps={N_STEPS}")]) == 0
    return run


def anneal_arguments(run: Path) -> list[str]:
    return ["fit", "--config", str(run / "config.yaml"), "--ckpt_path", str(run)]


def anneal(run: Path, *options: str) -> int:
    return main([*anneal_arguments(run), *options])


def rates(run: Path) -> dict[int, float]:
    """The logged learning rate by step, from 1."""
    with (run / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/learning_rate"]]
    return {int(row["step"]) + 1: float(row["train/learning_rate"]) for row in rows}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"])


def test_the_rate_falls_from_the_runs_to_zero_in_a_folder_of_its_own(stable_run, tmp_path) -> None:
    before = weights(stable_run)

    assert anneal(stable_run, "--anneal=0.5", f"--run_dir={tmp_path / 'branch'}") == 0

    peak = rates(stable_run)[N_STEPS]
    falling = rates(tmp_path / "branch")
    assert list(falling) == list(range(N_STEPS + 1, N_STEPS + 11))
    assert list(falling.values()) == pytest.approx(
        [peak * (1 - step / 10) for step in range(1, 11)]
    )
    assert all(torch.equal(before[name], value) for name, value in weights(stable_run).items())


def test_it_branches_beside_the_run_without_a_run_dir(stable_run, capfd) -> None:
    assert anneal(stable_run, "--anneal=0.1") == 0

    branch = stable_run.with_name("run-anneal")
    config = yaml.safe_load((branch / "config.yaml").read_text())
    assert config["trainer"]["max_steps"] == N_STEPS + 2
    assert config["anneal"] is None
    assert f"from step {N_STEPS} to step {N_STEPS + 2}, in {branch}" in capfd.readouterr().out


def test_an_annealed_run_that_is_stopped_goes_on_to_the_same_weights(stable_run, tmp_path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    anneal(stable_run, "--anneal=0.8", f"--run_dir={whole}")
    signal = callback("integration.callbacks.Signalled", name="SIGTERM", stage="train", batch=27)
    command = [sys.executable, "-m", "anlit", *anneal_arguments(stable_run), "--anneal=0.8"]
    ended = subprocess.run([*command, f"--run_dir={stopped}", *signal], cwd=ROOT)
    assert ended.returncode == 75

    main(["fit", "--config", str(stopped / "config.yaml"), "--ckpt_path", "last"])

    assert weights(whole).keys() == weights(stopped).keys()
    assert all(torch.equal(value, weights(stopped)[name]) for name, value in weights(whole).items())


@pytest.mark.parametrize(("options", "words"), [
    (["--anneal=0"], "anneal=0.0 is out of range: give more than 0"),
    (["--anneal=0.001"], "anneal=0.001 of 20 steps is no step: give a larger share"),
    (["--anneal=0.2", "--ckpt_path=last"], "anneal needs the run that it branches from: give --ckpt_path RUN"),
    (["--anneal=0.2", "--ckpt_path=nowhere.ckpt"], "nowhere.ckpt"),
])  # fmt: skip
def test_a_wrong_anneal_is_one_sentence(stable_run, refusal, options, words: str) -> None:
    command = ["fit", "--config", stable_run / "config.yaml", "--ckpt_path", stable_run]

    assert words in refusal(*command, *options)


def test_a_second_branch_takes_the_next_folder(stable_run, capfd) -> None:
    folders = stable_run.with_name
    if not folders("run-anneal").exists():
        anneal(stable_run, "--anneal=0.1")

    assert anneal(stable_run, "--anneal=0.1") == 0

    assert (folders("run-anneal-2") / "checkpoints" / "last.ckpt").exists()
    printed = capfd.readouterr().out
    assert f"so this run takes {folders('run-anneal-2')}: continue it with" in printed
    assert f"to step {N_STEPS + 2}, in {folders('run-anneal-2')}" in printed


@pytest.mark.parametrize(
    ("name", "folder", "name_of_branch"),
    [
        ("wide", "runs/a-anneal", "wide-anneal"),
        ("cool", None, "cool"),
        (None, "runs/a-anneal", None),
    ],
)
def test_a_branch_has_the_runs_name_with_an_ending_or_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name, folder, name_of_branch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/a/checkpoints").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text("{name: wide, run_dir: runs/a}")
    config = Namespace(name=name, run_dir="runs/a")

    assert default_folder(Path("runs/a/checkpoints/last.ckpt"), config) == folder

    assert (config.name, config.run_dir) == (name_of_branch, None)
