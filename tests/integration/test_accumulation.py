"""Validation, checkpoints and the end of a run come between optimizer steps, whatever the accumulation."""

import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from tests.integration.conftest import assert_same_training_state, fit_arguments, last_checkpoint, logged, run


def accumulating(shards: Path, run_dir: Path, micro_batches: int, *extra: str) -> list[str]:
    """12 optimizer steps of so many micro-batches of 1; validation every 5 steps, no other checkpoint."""
    return fit_arguments(
        shards, run_dir, "--data.batch_size=1", f"--trainer.accumulate_grad_batches={micro_batches}",
        "--trainer.val_check_interval=5", "--trainer.max_steps=12", "--checkpoint_every_n_steps=100", *extra,
    )  # fmt: skip


def killed_at(batch: int) -> list[str]:
    callback = "--trainer.callbacks+=tests.integration.callbacks.SignalAt"
    return [callback, f"--trainer.callbacks.batch={batch}", "--trainer.callbacks.name=SIGKILL"]


def steps_of(run_dir: Path, metric: str) -> list[int]:
    return [step for step, _ in logged(run_dir, metric)]


@pytest.mark.parametrize("micro_batches", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 8))])
def test_killed_after_a_validation_and_continued_is_identical(shards: Path, tmp_path: Path, micro_batches: int) -> None:
    """The interval of 5 is no multiple of the accumulation; the kill is within step 8, counted from 0."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(accumulating(shards, whole, micro_batches)) == 0
    assert run(accumulating(shards, cut, micro_batches, *killed_at(8 * micro_batches + 1))) == -signal.SIGKILL
    assert last_checkpoint(cut)["global_step"] == 5
    assert run(accumulating(shards, cut, micro_batches, "--ckpt_path=last")) == 0
    assert_same_training_state(last_checkpoint(whole), last_checkpoint(cut))
    assert steps_of(whole, "val/loss") == steps_of(cut, "val/loss") == [4, 9, 11]
    assert steps_of(whole, "train/loss") == steps_of(cut, "train/loss") == [*range(12)]


@pytest.mark.slow
def test_epochs_are_continued_exactly(shards: Path, tmp_path: Path) -> None:
    """Epochs of 8 micro-batches, two to a step; killed at the last step of the first, and in the second."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    extra = ("--trainer.limit_train_batches=8", "--trainer.val_check_interval=3")
    assert run(accumulating(shards, whole, 2, *extra)) == 0
    assert run(accumulating(shards, cut, 2, *extra, *killed_at(6))) == -signal.SIGKILL
    assert last_checkpoint(cut)["global_step"] == 3
    assert run(accumulating(shards, cut, 2, *extra, "--ckpt_path=last")) == 0
    assert_same_training_state(last_checkpoint(whole), last_checkpoint(cut))
    assert steps_of(whole, "val/loss") == steps_of(cut, "val/loss") == [2, 5, 8, 11]


class Numbers(L.Callback):
    """Prints the number of the micro-batch in the epoch at its begin."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        print("micro-batch", trainer.global_step, batch_idx)


@pytest.mark.parametrize("earlier", [1, 2, 3])
def test_micro_batches_are_numbered_as_in_an_undisturbed_run(
    shards: Path, tmp_path: Path, earlier: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Random numbers of a step depend on it. Continued after 6 steps, also with another accumulation."""
    numbers = "--trainer.callbacks+=tests.integration.test_accumulation.Numbers"
    assert run(accumulating(shards, tmp_path / "run", earlier, "--trainer.max_steps=6")) == 0
    capfd.readouterr()
    assert run(accumulating(shards, tmp_path / "run", 2, "--trainer.max_steps=8", "--ckpt_path=last", numbers)) == 0
    lines = [line.split()[1:] for line in capfd.readouterr().out.splitlines() if line.startswith("micro-batch")]
    assert lines == [["6", "12"], ["6", "13"], ["7", "14"], ["7", "15"]]


def test_continued_with_another_accumulation_every_step_is_whole(shards: Path, tmp_path: Path) -> None:
    """5 steps of 2 micro-batches, then 7 of 4: after 10 Lightning by itself would step after two more."""
    run_dir = tmp_path / "run"
    assert run(accumulating(shards, run_dir, 2, "--trainer.max_steps=5")) == 0
    assert run(accumulating(shards, run_dir, 4, "--ckpt_path=last")) == 0
    assert last_checkpoint(run_dir)["TokenShards"]["drawn"] == 5 * 2 + 7 * 4
    assert steps_of(run_dir, "train/loss") == [*range(12)]
