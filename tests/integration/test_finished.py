"""A run is finished if its folder has the weights of the last step. Else a sentence says why."""

import json
import shutil
from pathlib import Path

import pytest

from anlit.cli import main
from tests.integration.conftest import Train, fit_arguments, last_checkpoint

STEPS = 12


@pytest.fixture
def source(trained: Train) -> Path:
    """A run of 12 steps."""
    return trained(f"--trainer.max_steps={STEPS}")


@pytest.mark.parametrize("max_steps", [STEPS, STEPS - 4])
def test_a_new_run_from_a_checkpoint_without_steps_left_is_refused(
    shards: Path, tmp_path: Path, source: Path, max_steps: int, refusal
) -> None:
    """Nothing is left of it."""
    last = source / "checkpoints" / "last.ckpt"
    flags = (f"--trainer.max_steps={max_steps}", f"--ckpt_path={last}")
    error = refusal(*fit_arguments(shards, tmp_path / "run", *flags))
    assert f"has {STEPS} steps and trainer.max_steps={max_steps} leaves none to train" in error
    assert not (tmp_path / "run").exists()


def test_a_run_folder_as_ckpt_path_continues_its_last_checkpoint(
    shards: Path, tmp_path: Path, source: Path
) -> None:
    run_dir = shutil.copytree(source, tmp_path / "run")
    flags = (f"--trainer.max_steps={STEPS + 2}", f"--ckpt_path={run_dir}")

    assert main(fit_arguments(shards, run_dir, *flags)) == 0

    assert last_checkpoint(run_dir)["global_step"] == STEPS + 2


def test_a_new_run_without_time_is_refused(shards: Path, tmp_path: Path, refusal) -> None:
    error = refusal(*fit_arguments(shards, tmp_path / "run", "--trainer.max_time=00:00:00:00"))
    assert "trainer.max_time leaves no time for a step: give a longer one" in error
    assert not (tmp_path / "run").exists()


def test_a_continued_run_without_time_is_not_finished(
    shards: Path, tmp_path: Path, source: Path, refusal
) -> None:
    """Its record stays as it was."""
    run_dir = shutil.copytree(source, tmp_path / "run")
    record = json.loads((run_dir / "run.json").read_text()) | {"status": "interrupted"}
    (run_dir / "run.json").write_text(json.dumps(record))
    flags = ("--trainer.max_steps=20", "--ckpt_path=last", "--trainer.max_time=00:00:00:00")
    assert "trainer.max_time leaves no time" in refusal(*fit_arguments(shards, run_dir, *flags))
    assert json.loads((run_dir / "run.json").read_text()) == record
    assert last_checkpoint(run_dir)["global_step"] == STEPS
