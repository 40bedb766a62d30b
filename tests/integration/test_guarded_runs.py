"""A run that skipped steps goes on after an interruption as one that was never stopped."""

import math
from pathlib import Path

import pytest

from tests.integration.conftest import assert_same_training_state, fit_arguments, last_checkpoint, run
from tests.integration.ranks import DDP, FSDP, column, run_ranks


def guarded(shards: Path, run_dir: Path, bad: str, *extra: str) -> list[str]:
    """Checkpoints every 8 steps, validation every 17; `bad` lists the batches that are bad."""
    return fit_arguments(
        shards, run_dir, "--trainer.callbacks+=LossGuard", "--trainer.callbacks.on_spike=skip",
        "--trainer.callbacks.window=16", "--trainer.callbacks+=tests.training.poison.Poison",
        f"--trainer.callbacks.batches={bad}", "--trainer.max_steps=36", *extra,
    )  # fmt: skip


def test_continued_is_identical(shards: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(guarded(shards, whole, "[12,30]")) == 0
    stop = ("--trainer.callbacks+=tests.integration.callbacks.SignalAt", "--trainer.callbacks.batch=26")
    assert run(guarded(shards, cut, "[12,30]", *stop)) == 1
    assert last_checkpoint(cut)["global_step"] == 27
    assert run(guarded(shards, cut, "[12,30]", "--ckpt_path=last")) == 0
    one, two = last_checkpoint(whole), last_checkpoint(cut)
    assert_same_training_state(one, two)
    guards = [checkpoint["callbacks"]["LossGuard"] for checkpoint in (one, two)]
    assert guards[0] == guards[1]
    assert guards[0]["skipped"] == 2
    assert all(map(math.isfinite, guards[0]["losses"]))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [DDP, FSDP])
def test_all_ranks_skip_what_one_of_them_saw(shards: Path, tmp_path: Path, strategy: list[str]) -> None:
    """A NaN on rank 1 only: were the answers different, the ranks would wait for each other in vain."""
    short = ["--trainer.callbacks.rank=1", "--trainer.max_steps=6", "--trainer.limit_val_batches=0"]
    assert run_ranks(guarded(shards, tmp_path, "[3]", *short, *strategy), 2) == [0, 0]
    assert column(tmp_path, "guard/skipped") == [0, 0, 0, 1, 1, 1]
