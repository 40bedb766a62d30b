"""A user's ModelCheckpoints go on after a resume as in a run that was never stopped."""

import shutil
from pathlib import Path

import pytest

from anlit.checkpoints.checkpoint_io import read_checkpoint
from anlit.cli import main
from tests.integration.cases import slow_cases
from tests.integration.conftest import KILLED, fit_arguments, run, signal_at

SETTINGS = (
    "--trainer.max_steps=24",
    "--trainer.val_check_interval=4",
    "--checkpoint_every_n_steps=5",
    "--model.optimizer.lr=0.05",
)
CALLBACKS = {
    "lowest": {"monitor": "val/loss", "save_top_k": 1, "filename": "lowest-{step}"},
    "highest": {"monitor": "val/loss", "mode": "max", "save_top_k": 2, "filename": "highest"},
    "all": {"monitor": "val/tokens", "mode": "max", "save_top_k": -1, "filename": "all-{step}"},
    "train": {
        "monitor": "train/loss",
        "save_top_k": 2,
        "every_n_train_steps": 3,
        "filename": "train-{step}",
    },
    "stale": {
        "monitor": "val/loss",
        "mode": "max",
        "save_top_k": 2,
        "every_n_train_steps": 7,
        "filename": "stale-{step}",
    },
    "newest": {"every_n_train_steps": 3, "filename": "newest-{step}"},
}


def arguments(shards: Path, run_dir: Path, *extra: str) -> list[str]:
    flags = []
    for settings in CALLBACKS.values():
        flags.append("--trainer.callbacks+=ModelCheckpoint")
        for name, value in settings.items():
            flags.append(f"--trainer.callbacks.{name}={value}")
    return fit_arguments(shards, run_dir, *SETTINGS, *flags, *extra)


def steps_of_checkpoints(run_dir: Path) -> dict[str, int]:
    """Return name → step of a run's checkpoints."""
    step_by_name = {}
    for file in (run_dir / "checkpoints").glob("*.ckpt"):
        step_by_name[file.name] = read_checkpoint(file)["global_step"]
    return step_by_name


def scores_by_callback(run_dir: Path) -> dict[str, dict[str, float]]:
    """Return the names and scores that each callback still compares with."""
    states = read_checkpoint(run_dir / "checkpoints" / "last.ckpt")["callbacks"]
    named = {}
    for key, state in states.items():
        if "best_k_models" in state:
            named[key] = {name: float(score) for name, score in state["best_k_models"].items()}
    return named


@pytest.fixture(scope="module")
def whole(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert main(arguments(shards, run_dir)) == 0
    for name in CALLBACKS:
        assert any(file.startswith(name) for file in steps_of_checkpoints(run_dir))
    return run_dir


@pytest.mark.parametrize("batch", [13, *slow_cases([19])])
def test_a_killed_run_keeps_the_same_files(
    shards: Path, tmp_path: Path, whole: Path, batch: int
) -> None:
    """Files after its last.ckpt are written again, not beside."""
    run_dir = tmp_path / "run"
    assert run(arguments(shards, run_dir, *signal_at("SIGKILL", batch))) == KILLED
    assert run(arguments(shards, run_dir, "--ckpt_path=last")) == 0
    assert steps_of_checkpoints(run_dir) == steps_of_checkpoints(whole)
    assert scores_by_callback(run_dir) == scores_by_callback(whole)


def test_a_stopped_run_keeps_the_same_files_where_it_was_copied_and_moved_to(
    shards: Path, tmp_path: Path, whole: Path
) -> None:
    """A copied run changes nothing in the folder that it was copied from."""
    first = tmp_path / "first"
    copied = tmp_path / "copied"
    moved = tmp_path / "moved"
    assert run(arguments(shards, first, *signal_at("SIGTERM", 13))) == 75
    steps_before = steps_of_checkpoints(first)

    shutil.copytree(first, copied)
    assert run(arguments(shards, copied, "--ckpt_path=last")) == 0
    assert steps_of_checkpoints(first) == steps_before
    shutil.move(first, moved)
    assert run(arguments(shards, moved, "--ckpt_path=last")) == 0

    for run_dir in (copied, moved):
        assert steps_of_checkpoints(run_dir) == steps_of_checkpoints(whole)
        assert scores_by_callback(run_dir) == scores_by_callback(whole)


def test_a_new_run_from_another_ones_checkpoint_begins_its_own_list(
    shards: Path, tmp_path: Path, whole: Path
) -> None:
    source = whole / "checkpoints" / "last.ckpt"
    steps_before = steps_of_checkpoints(whole)
    longer = "--trainer.max_steps=28"
    assert run(arguments(shards, tmp_path / "run", longer, f"--ckpt_path={source}")) == 0
    assert steps_of_checkpoints(whole) == steps_before
    assert steps_of_checkpoints(tmp_path / "run")["best.ckpt"] == 28
