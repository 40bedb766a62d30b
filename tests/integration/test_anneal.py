"""`anlit fit --anneal`: a run branched from a checkpoint, whose rate falls to 0."""

from pathlib import Path

import pytest
import torch
from jsonargparse import Namespace

from anlit.checkpoints.checkpoint_io import read_checkpoint
from anlit.cli import main
from anlit.commands.anneal import configured_schedule, leave_run_folder
from anlit.errors import UserError
from tests.integration.conftest import assert_identical, fit_arguments, run, signal_at
from tests.integration.run_files import column, config_of, steps

STABLE = ("--model.schedule=WSD", "--model.schedule.decay=0", "--model.schedule.warmup=0.1")
N_STEPS = 20


@pytest.fixture(scope="module")
def stable_run(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps at its peak rate."""
    run_dir = tmp_path_factory.mktemp("stable") / "run"
    settings = (*STABLE, f"--trainer.max_steps={N_STEPS}")
    assert main(fit_arguments(shards, run_dir, *settings)) == 0
    return run_dir


def anneal_arguments(run_dir: Path) -> list[str]:
    return ["fit", "--config", str(run_dir / "config.yaml"), "--ckpt_path", str(run_dir)]


def anneal(run_dir: Path, *options: str) -> int:
    return main([*anneal_arguments(run_dir), *options])


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(run_dir / "checkpoints" / "last.ckpt")["state_dict"])


def test_the_rate_falls_from_the_runs_to_zero_in_a_folder_of_its_own(stable_run, tmp_path) -> None:
    stable_weights = weights(stable_run)
    branch = tmp_path / "branch"

    assert anneal(stable_run, "--anneal=0.5", f"--run_dir={branch}") == 0

    peak = column(stable_run, "train/learning_rate")[-1]
    shares = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    expected = [peak * share for share in shares]
    assert steps(branch, "train/learning_rate") == [*range(N_STEPS, N_STEPS + 10)]
    assert column(branch, "train/learning_rate") == pytest.approx(expected)
    assert_identical(stable_weights, weights(stable_run), "weights of the run")


def test_it_branches_beside_the_run_without_a_run_dir_and_once_more_in_the_next_folder(
    stable_run, capfd
) -> None:
    branch = stable_run.with_name("run-anneal")
    second = stable_run.with_name("run-anneal-2")

    assert anneal(stable_run, "--anneal=0.1") == 0

    assert config_of(branch)["trainer"]["max_steps"] == N_STEPS + 2
    assert config_of(branch)["anneal"] is None
    assert f"from step {N_STEPS} to step {N_STEPS + 2}, in {branch}" in capfd.readouterr().out

    assert anneal(stable_run, "--anneal=0.1") == 0

    assert (second / "checkpoints" / "last.ckpt").exists()
    printed = capfd.readouterr().out
    assert f"so this run takes {second}: continue it with" in printed
    assert f"to step {N_STEPS + 2}, in {second}" in printed


def test_an_annealed_run_that_is_stopped_goes_on_to_the_same_weights(stable_run, tmp_path) -> None:
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    arguments = [*anneal_arguments(stable_run), "--anneal=0.4"]

    assert main([*arguments, f"--run_dir={whole}"]) == 0
    assert run([*arguments, f"--run_dir={stopped}", *signal_at("SIGTERM", 23)]) == 75
    assert main(["fit", "--config", str(stopped / "config.yaml"), "--ckpt_path", "last"]) == 0

    assert_identical(weights(whole), weights(stopped), "weights")


@pytest.mark.parametrize(("options", "words"), [
    (["--anneal=0"], "anneal=0.0 is out of range: give more than 0"),
    (["--anneal=0.001"], "anneal=0.001 of 20 steps is less than a step: give a larger share"),
    (["--anneal=0.2", "--ckpt_path=last"],
     "anneal needs the run that it branches from: give --ckpt_path RUN"),
    (["--anneal=0.2", "--ckpt_path=nowhere.ckpt"], "nowhere.ckpt"),
])  # fmt: skip
def test_a_wrong_anneal_is_one_sentence(stable_run, refusal, options, words: str) -> None:
    assert words in refusal(*anneal_arguments(stable_run), *options)


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

    assert leave_run_folder(Path("runs/a/checkpoints/last.ckpt"), config) == folder

    assert (config.name, config.run_dir) == (name_of_branch, None)


@pytest.mark.parametrize("schedule", [None, {"init_args": {}}])
def test_a_checkpoint_without_a_schedule_is_refused(schedule: object) -> None:
    """One of a class of the user's may have no rate at which an anneal could begin."""
    content = {"hyper_parameters": {"schedule": schedule}}

    with pytest.raises(UserError, match=r"a\.ckpt records no schedule, and anneal begins at its"):
        configured_schedule(content, Path("a.ckpt"))
