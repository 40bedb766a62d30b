"""SIGKILL while checkpoints are being written: the last one is whole, and what was half-written is removed later."""

import io
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from anlit.checkpoints import checkpoint_io, sharded, writing
from anlit.checkpoints.location import SHARDED
from tests.integration.conftest import assert_same_training_state, die_at, fit_arguments, last_checkpoint, steps_logged
from tests.integration.ranks import FSDP, run_ranks, start_ranks

slow = pytest.mark.slow
EVERY_STEP = "--checkpoint_every_n_steps=1"


def arguments(shards: Path, run_dir: Path, steps: int, *extra: str) -> list[str]:
    return fit_arguments(
        shards, run_dir, f"--trainer.max_steps={steps}", "--trainer.limit_val_batches=0", EVERY_STEP,
        "--model.dropout=0.1", *extra,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    assert run_ranks(arguments(shards, run_dir, 6, *FSDP), 2) == [0, 0]
    return run_dir


@pytest.mark.parametrize(
    "name", ["give_name", pytest.param("write_durably", marks=slow), pytest.param("_publish", marks=slow)]
)
def test_killed_at_each_stage_of_writing(
    shards: Path, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Before the rest is written, before the name changes, and between the link and its renaming."""
    run_dir, steps = tmp_path / "run", 6
    with monkeypatch.context() as patch:
        die_at(patch, sharded, name, 4)
        codes = run_ranks(arguments(shards, run_dir, steps, *FSDP), 2)
    assert codes[0] == -signal.SIGKILL
    assert codes[1] != 0
    assert last_checkpoint(run_dir)["global_step"] == 3
    folders = run_dir / "checkpoints" / SHARDED
    assert len([*folders.iterdir()]) == 2
    assert run_ranks(arguments(shards, run_dir, steps, *FSDP, "--ckpt_path=last"), 2) == [0, 0]
    assert_same_training_state(last_checkpoint(run_dir), last_checkpoint(undisturbed))
    assert [*folders.iterdir()] == [(run_dir / "checkpoints" / "last.ckpt").resolve()]


def test_killed_inside_the_first_checkpoint_it_begins_anew_and_says_so(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What was half-written is no checkpoint to go on from."""
    run_dir = tmp_path / "run"
    run = arguments(shards, run_dir, 3, "--ckpt_path=last")
    with monkeypatch.context() as patch:
        die_at(patch, checkpoint_io, "give_name", 1)
        assert run_ranks(run, 1) == [-signal.SIGKILL]
    assert [file.name for file in (run_dir / "checkpoints").iterdir()] == [".partial-last.ckpt"]
    assert run_ranks(run, 1) == [0]
    said = capfd.readouterr().out
    assert said.count("was stopped before its first checkpoint was complete: it starts again at step 0") == 1
    assert last_checkpoint(run_dir)["global_step"] == 3
    assert [file.name for file in (run_dir / "checkpoints").iterdir()] == ["last.ckpt"]


def test_a_folder_that_has_a_name_is_no_leftover(tmp_path: Path) -> None:
    """Not even where another name stood for it first; nor is a folder that belongs to another run."""
    ours, others = tmp_path / "run" / SHARDED / "last-1", tmp_path / "other" / SHARDED / "last-2"
    for folder in (ours, others):
        folder.mkdir(parents=True)
    (tmp_path / "run" / "best.ckpt").symlink_to(Path(SHARDED) / "last-1")
    (tmp_path / "run" / "last.ckpt").symlink_to(others)
    storage = checkpoint_io.AtomicCheckpointIO()
    storage.save_checkpoint({"step": 1}, tmp_path / "run" / "last.ckpt")
    writing.remove_unnamed(tmp_path / "run")
    assert ours.is_dir()
    assert others.is_dir()
    assert torch.load(tmp_path / "run" / "last.ckpt") == {"step": 1}
    storage.remove_checkpoint(tmp_path / "run" / "best.ckpt")
    assert ours.is_dir(), "this process did not write it"
    writing.remove_checkpoint(tmp_path / "run" / "best.ckpt")
    assert not ours.exists()


def slowly(content: Any, path: Path) -> None:
    """`write_durably` in two halves with a pause between, to be killed there."""
    whole = io.BytesIO()
    torch.save(content, whole)
    half = len(whole.getvalue()) // 2
    with path.open("wb") as file:
        file.write(whole.getvalue()[:half])
        file.flush()
        time.sleep(0.05)
        file.write(whole.getvalue()[half:])


def kill_at(
    run: list[str], n_ranks: int, run_dir: Path, step: int, delay: float, during: Callable[[], bool] | None
) -> None:
    """SIGKILL to all ranks a moment after step number `step` is logged; with `during`, when that is next the case."""
    processes = start_ranks(run, n_ranks)

    def wait_until(condition: Callable[[], bool]) -> None:
        while not condition() and all(process.is_alive() for process in processes):
            time.sleep(0.001)

    wait_until(lambda: steps_logged(run_dir) >= step)
    time.sleep(delay)
    wait_until(during or (lambda: True))
    for process in processes:  # all before the first is waited for: a rank that sees another gone ends by itself
        process.kill()
    for process in processes:
        process.join()
    assert {process.exitcode for process in processes} == {-signal.SIGKILL}


def newer(path: Path, than: float) -> bool:
    """Whether there is such a file or folder that was changed later than that; what a killed run left is older."""
    try:
        return path.stat().st_mtime > than
    except FileNotFoundError:
        return False


@slow
def test_one_process_killed_at_twenty_random_moments(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second of them while a checkpoint is being written, which a moment on a busy machine seldom is."""
    whole, cut, half_written = tmp_path / "whole", tmp_path / "cut", 0
    unfinished = cut / "checkpoints" / ".partial-last.ckpt"
    assert run_ranks(arguments(shards, whole, 60), 1) == [0]
    chance = random.Random(5)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_io, "write_durably", slowly)
        for number, step in enumerate(sorted(chance.sample(range(1, 50), 20))):
            run = arguments(shards, cut, 60, "--ckpt_path=last")
            writing = partial(newer, unfinished, time.time())
            kill_at(run, 1, cut, step, chance.uniform(0, 0.1), writing if number % 2 else None)
            half_written += writing()
            assert last_checkpoint(cut)["global_step"] >= step
    assert half_written > 0
    assert run_ranks(arguments(shards, cut, 60, "--ckpt_path=last"), 1) == [0]
    assert_same_training_state(last_checkpoint(whole), last_checkpoint(cut))


@slow
@pytest.mark.parametrize("background", ["false", "true"])
def test_two_ranks_killed_at_random_moments(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: str
) -> None:
    strategy = [*FSDP, f"--trainer.strategy.async_checkpoints={background}"]
    whole, cut, half_written = tmp_path / "whole", tmp_path / "cut", 0
    folders = cut / "checkpoints" / SHARDED

    def unfinished(begun: float) -> bool:
        whole = (cut / "checkpoints" / "last.ckpt").resolve()
        return any(newer(folder, begun) and folder.resolve() != whole for folder in folders.glob("*"))

    assert run_ranks(arguments(shards, whole, 30, *strategy), 2) == [0, 0]
    chance = random.Random(6)
    with monkeypatch.context() as patch:
        patch.setattr(sharded, "write_durably", slowly)
        for number, step in enumerate(sorted(chance.sample(range(2, 26), 6))):
            run = arguments(shards, cut, 30, *strategy, "--ckpt_path=last")
            writing = partial(unfinished, time.time())
            kill_at(run, 2, cut, step, chance.uniform(0, 0.1), writing if number % 2 else None)
            half_written += writing()
            assert last_checkpoint(cut)["global_step"] >= 1
    assert half_written > 0
    assert run_ranks(arguments(shards, cut, 30, *strategy, "--ckpt_path=last"), 2) == [0, 0]
    assert len([*folders.iterdir()]) == 1
    assert_same_training_state(last_checkpoint(whole), last_checkpoint(cut))
