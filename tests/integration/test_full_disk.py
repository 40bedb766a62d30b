"""A checkpoint that cannot be written ends the run on every rank, in one sentence, and leaves the one before."""

import json
from pathlib import Path

import pytest

from anlit.checkpoints.checkpoint_io import read_checkpoint
from anlit.checkpoints.location import SHARDED
from tests.data.preparing import members, wait_for
from tests.integration.conftest import fit_arguments
from tests.integration.ranks import DDP, FSDP, start_ranks
from tests.integration.test_signals_on_ranks import command

STEPS, SAVED, FULL_FROM = 24, 8, 10
BACKGROUND = [*FSDP, "--trainer.strategy.async_checkpoints=true"]
slow = pytest.mark.slow


def arguments(shards: Path, run_dir: Path, strategy: list[str], *on: str) -> list[str]:
    """Checkpoints are due after steps 8, 16 and 24; from step 10 on the disk is full for the ranks told."""
    return fit_arguments(
        shards, run_dir, f"--trainer.max_steps={STEPS}", "--trainer.val_check_interval=1000", *strategy,
        "--trainer.callbacks+=tests.integration.callbacks.FullDisk", f"--trainer.callbacks.batch={FULL_FROM}", *on,
    )  # fmt: skip


def assert_failed_in_one_sentence(run_dir: Path, said: str) -> None:
    assert "Traceback" not in said
    sentences = [line for line in said.splitlines() if line.startswith("anlit: error: ")]
    assert len(sentences) == 1
    assert "last.ckpt could not be written" in sentences[0]
    assert "File too large" in sentences[0]
    assert "is complete, continue with --ckpt_path last" in sentences[0]
    record = json.loads((run_dir / "run.json").read_text())
    assert record["status"] == "failed"
    assert "File too large" in record["error"]
    assert read_checkpoint(run_dir / "checkpoints" / "last.ckpt")["global_step"] == SAVED


@pytest.mark.parametrize(
    ("strategy", "rank"),
    [
        pytest.param(BACKGROUND, 1, id="background-1", marks=slow),
        pytest.param(BACKGROUND, 0, id="background-0", marks=slow),
        pytest.param(FSDP, 1, id="fsdp-1"),
        pytest.param(FSDP, 0, id="fsdp-0", marks=slow),
        pytest.param(DDP, 0, id="ddp-0", marks=slow),
    ],
)
def test_every_rank_ends(shards: Path, tmp_path: Path, strategy: list[str], rank: int) -> None:
    run_dir = tmp_path / "run"
    full = arguments(shards, run_dir, strategy, f"--trainer.callbacks.rank={rank}")
    processes = start_ranks(full, 2, log=tmp_path / "log")
    for process in processes:
        process.join(60)
    assert processes[0].exitcode == 1
    assert processes[1].exitcode in ((1,) if strategy is not DDP else (1, 2))
    assert_failed_in_one_sentence(run_dir, (tmp_path / "log.0").read_text())
    if strategy is not DDP:
        assert_failed_in_one_sentence(run_dir, (tmp_path / "log.1").read_text())
        assert len([*(run_dir / "checkpoints" / SHARDED).iterdir()]) == 1


def test_one_process_ends(shards: Path, tmp_path: Path) -> None:
    (process,) = start_ranks(arguments(shards, tmp_path / "run", []), 1, log=tmp_path / "log")
    process.join(120)
    assert process.exitcode == 1
    assert_failed_in_one_sentence(tmp_path / "run", (tmp_path / "log.0").read_text())
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["last.ckpt"]


@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_no_launched_rank_is_left_behind(shards: Path, tmp_path: Path, rank: int) -> None:
    run = arguments(shards, tmp_path / "run", BACKGROUND, f"--trainer.callbacks.rank={rank}")
    process = command(run)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1, said
    assert "Traceback" not in said
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    wait_for(lambda: members(process.pid) == [], 30)
