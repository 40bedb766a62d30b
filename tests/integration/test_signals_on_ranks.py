"""A signal to one rank stops all after the same step; a rank that dies ends the others with an error."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.preparing import members, wait_for
from tests.integration.conftest import assert_same_training_state, fit_arguments, last_checkpoint
from tests.integration.ranks import DDP, FSDP, run_ranks, start_ranks

STEPS, BATCH = 20, 11
slow = pytest.mark.slow


def arguments(shards: Path, run_dir: Path, strategy: list[str], *extra: str) -> list[str]:
    return fit_arguments(shards, run_dir, f"--trainer.max_steps={STEPS}", "--model.dropout=0.1", *strategy, *extra)


def signal_at(name: str, rank: int) -> list[str]:
    return ["--trainer.callbacks+=tests.integration.callbacks.SignalAt", f"--trainer.callbacks.batch={BATCH}",
            f"--trainer.callbacks.name={name}", f"--trainer.callbacks.rank={rank}"]  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "name", "rank"),
    [
        pytest.param(DDP, "SIGTERM", 1, id="ddp-term1", marks=slow),
        pytest.param(FSDP, "SIGUSR1", 1, id="fsdp-usr1"),
        pytest.param(DDP, "SIGUSR1", 0, id="ddp-usr0", marks=slow),
        pytest.param(FSDP, "SIGTERM", 0, id="fsdp-term0", marks=slow),
        pytest.param([*FSDP, "--trainer.strategy.async_checkpoints=true"], "SIGTERM", 1, id="async-term1", marks=slow),
    ],
)
def test_one_rank_is_told_and_all_stop(shards: Path, tmp_path: Path, strategy: list[str], name: str, rank: int) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_ranks(arguments(shards, whole, strategy), 2) == [0, 0]
    assert run_ranks(arguments(shards, cut, strategy, *signal_at(name, rank)), 2) == [75, 75]
    assert (
        last_checkpoint(cut)["global_step"] == BATCH + 2
    )  # asked at the end of its step, answered at the end of the next
    assert json.loads((cut / "run.json").read_text())["status"] == "interrupted"
    assert run_ranks(arguments(shards, cut, strategy, "--ckpt_path=last"), 2) == [0, 0]
    assert last_checkpoint(cut)["global_step"] == STEPS
    assert_same_training_state(last_checkpoint(whole), last_checkpoint(cut))


@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=slow)])
@pytest.mark.parametrize("strategy", [pytest.param(DDP, id="ddp", marks=slow), pytest.param(FSDP, id="fsdp")])
def test_a_killed_rank_ends_the_other(shards: Path, tmp_path: Path, strategy: list[str], killed: int) -> None:
    run = arguments(shards, tmp_path / "run", strategy, *signal_at("SIGKILL", killed))
    processes = start_ranks(run, 2, log=tmp_path / "log")
    processes[killed].join()
    assert processes[killed].exitcode == -signal.SIGKILL
    other = processes[1 - killed]
    other.join(60)
    assert other.exitcode not in (None, 0, 75)
    said = (tmp_path / f"log.{1 - killed}").read_text()
    assert "onnection closed by peer" in said or "onnection reset by peer" in said


def command(run: list[str]) -> subprocess.Popen:
    """`anlit` as a user starts it: one command, whose other rank Lightning launches, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "anlit", *run, "--trainer.devices=2"],
        cwd=Path(__file__).parents[2], start_new_session=True, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@slow
@pytest.mark.parametrize("strategy", [pytest.param(DDP, id="ddp"), pytest.param(FSDP, id="fsdp")])
@pytest.mark.parametrize(("name", "rank", "ends"), [("SIGTERM", 0, [75]), ("SIGKILL", 1, [1, -signal.SIGKILL])])
def test_one_command_for_all_ranks(
    shards: Path, tmp_path: Path, strategy: list[str], name: str, rank: int, ends: list[int]
) -> None:
    process = command(arguments(shards, tmp_path / "run", strategy, *signal_at(name, rank)))
    _, said = process.communicate(timeout=600)
    assert process.returncode in ends, said
    if name == "SIGTERM":
        assert last_checkpoint(tmp_path / "run")["global_step"] == BATCH + 2
    else:
        assert any(words in said for words in ("closed by peer", "reset by peer", "Child process"))
    wait_for(lambda: members(process.pid) == [], 60)
