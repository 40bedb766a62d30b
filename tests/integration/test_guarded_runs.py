"""A run that skipped or undid steps goes on after an interruption as one that was never stopped."""

import math
from pathlib import Path

import pytest

from tests.integration.conftest import assert_same_training_state, fit_arguments, last_checkpoint, run
from tests.integration.ranks import DDP, FSDP, column, run_ranks


def guarded(shards: Path, run_dir: Path, action: str, *extra: str) -> list[str]:
    """Snapshots every 7 steps, checkpoints every 8, validation every 17; the batches 12 and 30 are bad."""
    return fit_arguments(
        shards, run_dir, "--trainer.callbacks+=LossGuard", f"--trainer.callbacks.on_nan={action}",
        "--trainer.callbacks.on_spike=skip", "--trainer.callbacks.window=16",
        "--trainer.callbacks.snapshot_every_n_steps=7", "--trainer.callbacks+=tests.training.poison.Poison",
        "--trainer.callbacks.batches=[12,30]", "--trainer.max_steps=36", *extra,
    )  # fmt: skip


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("action", "stop_at"),
    [("roll_back", 26), pytest.param("roll_back", 13, marks=slow), pytest.param("skip", 26, marks=slow)],
)
def test_continued_is_identical(shards: Path, tmp_path: Path, action: str, stop_at: int) -> None:
    """Stopped after batch 26 at a state that is no snapshot, so that batch 30 needs the one after step 21."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(guarded(shards, whole, action)) == 0
    stop = ("--trainer.callbacks+=tests.integration.callbacks.SignalAt", f"--trainer.callbacks.batch={stop_at}")
    assert run(guarded(shards, cut, action, *stop)) == 1
    stopped = last_checkpoint(cut)
    assert stopped["global_step"] == stop_at + 1
    snapshot = stopped["callbacks"]["LossGuard"]["snapshot"]
    assert (snapshot is None) == (action == "skip" or stop_at == 13)
    assert run(guarded(shards, cut, action, "--ckpt_path=last")) == 0
    one, two = last_checkpoint(whole), last_checkpoint(cut)
    assert_same_training_state(one, two)
    guards = [checkpoint["callbacks"]["LossGuard"] for checkpoint in (one, two)]
    assert guards[0]["losses"] == guards[1]["losses"]
    assert guards[0]["norms"] == guards[1]["norms"]
    counted = "skipped" if action == "skip" else "rolled_back"
    assert guards[0][counted] == guards[1][counted] == 2
    assert all(map(math.isfinite, guards[0]["losses"]))


@slow
@pytest.mark.parametrize("strategy", [DDP, FSDP])
def test_all_ranks_undo_what_one_of_them_saw(shards: Path, tmp_path: Path, strategy: list[str]) -> None:
    """A NaN on rank 1 only: were the answers different, the ranks would wait for each other in vain."""
    arguments = guarded(shards, tmp_path, "roll_back", "--trainer.callbacks.rank=1", *strategy)
    arguments += ["--trainer.max_steps=6", "--trainer.limit_val_batches=0"]
    assert run_ranks([argument.replace("[12,30]", "[3]") for argument in arguments], 2) == [0, 0]
    assert column(tmp_path, "guard/rolled_back") == [0, 0, 0, 1, 1, 1]
    assert column(tmp_path, "guard/skipped") == [0] * 6
