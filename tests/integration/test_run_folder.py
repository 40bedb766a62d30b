"""A folder has one run at a time, and no run starts over another run."""

import itertools
import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from anlit.cli import main
from anlit.errors import PREEMPTED
from anlit.study.state import note_end, note_start, read_state
from anlit.training.run_folder import lock_run_folder
from tests.integration.conftest import STEPS, fit_arguments, last_checkpoint, run, steps_logged
from tests.integration.ranks import run_ranks_with_logs, start_ranks


def test_a_second_run_on_the_same_folder_is_refused(shards: Path, tmp_path: Path) -> None:
    """The first run goes on. After a kill the folder is free at once, though data workers live on."""
    run_dir = tmp_path / "run"
    arguments = fit_arguments(
        shards, run_dir, "--ckpt_path=last", "--data.num_workers=1", "--trainer.max_steps=2000"
    )
    (first,) = start_ranks(arguments, 1)
    while steps_logged(run_dir) < 10:
        assert first.is_alive()
        time.sleep(0.01)
    (code,), (error,) = run_ranks_with_logs(arguments, 1, tmp_path / "log")
    assert code == 2
    assert f"run_dir={run_dir} is being trained in by process {first.pid} on " in error
    assert "Traceback" not in error
    assert json.loads((run_dir / "run.json").read_text())["status"] == "running"
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    assert run(fit_arguments(shards, run_dir, "--ckpt_path=last", "--trainer.max_steps=12")) == 0


def test_a_folder_that_cannot_be_locked_gives_a_warning(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("anlit.training.run_folder.fcntl.lockf", no_locks)
    lock_run_folder(str(tmp_path)).close()
    assert "without locks" in caplog.text


CHECKPOINTS = ["last.ckpt", "best.ckpt"]


@pytest.mark.parametrize("lost", [["last.ckpt"], CHECKPOINTS, [*CHECKPOINTS, "../run.json"]])
def test_without_last_ckpt_a_run_goes_on_from_its_best_and_is_not_begun_anew(
    shards: Path, tmp_path: Path, finished: Path, lost: list[str], refusal
) -> None:
    run_dir = shutil.copytree(finished, tmp_path / "run")
    for name in lost:
        (run_dir / "checkpoints" / name).unlink()
    contents = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    late = "--checkpoint_every_n_steps=100"
    error = refusal(
        *fit_arguments(shards, run_dir, "--trainer.max_steps=20", "--ckpt_path=last", late)
    )
    assert "ckpt_path=last finds no checkpoints/last.ckpt" in error
    assert ("best.ckpt" in error) is (len(lost) == 1)
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == contents
    best = fit_arguments(shards, run_dir, "--trainer.max_steps=22", "--ckpt_path=best")
    if len(lost) == 1:
        best_checkpoint = f"{run_dir}/checkpoints/best.ckpt"
        fix = f"continue it with --ckpt_path {best_checkpoint}, or choose another --run_dir"
        assert fix in refusal(*fit_arguments(shards, run_dir))
        assert run(best) == 0
        assert last_checkpoint(run_dir)["global_step"] == 22
    else:
        assert f"ckpt_path={run_dir}/checkpoints/best.ckpt does not exist" in refusal(*best)


OTHER = "--ckpt_path={}/checkpoints/last.ckpt"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("metrics.csv", ""),
        ("config.yaml", ""),
        ("checkpoints", ""),
        ("checkpoints", OTHER),
        ("run.json", OTHER),
        ("hpc_ckpt_1.ckpt", ""),
    ],
)
def test_a_folder_with_files_of_a_run_is_continued_from_its_own_checkpoints_alone(
    shards: Path, tmp_path: Path, finished: Path, name: str, options: str, refusal
) -> None:
    (run_dir := tmp_path / "run").mkdir()
    source = finished / (
        "checkpoints/last.ckpt" if "hpc" in name else name
    )  # which Lightning's Slurm writes
    (shutil.copytree if name == "checkpoints" else shutil.copy)(source, run_dir / name)
    contents = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    error = refusal(*fit_arguments(shards, run_dir, *options.format(finished).split()))
    assert f"run_dir={run_dir} already holds a run" in error
    assert "continue it with --ckpt_path last, or choose another --run_dir" in error
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == contents


def test_each_launch_is_recorded_and_in_comparisons(
    shards: Path, tmp_path: Path, monkeypatch, capsys, caplog
) -> None:
    """A run starts at a commit, and continues at another. A launch without work is not recorded."""
    run_dir = tmp_path / "runs" / "run"
    for commit, steps in (
        ("a" * 40, 5),
        ("b" * 40, 9),
        ("b" * 40, 12),
        ("c" * 40, 12),
        ("c" * 40, 7),
    ):
        state = {"commit": commit, "dirty": False}
        monkeypatch.setattr(
            "anlit.training.callbacks.run_record.git_state", lambda state=state: state
        )
        assert (
            main(fit_arguments(shards, run_dir, f"--trainer.max_steps={steps}", "--ckpt_path=last"))
            == 0
        )
    messages = [
        message
        for message in caplog.messages
        if "nothing to do" in message or "changed settings" in message
    ]
    more = "nothing to do; more come with --trainer.max_steps N"
    assert messages[2:] == [
        f"{run_dir} has its 12 steps (trainer.max_steps={steps}): {more}" for steps in (12, 7)
    ]
    launches = json.loads((run_dir / "run.json").read_text())["launches"]
    assert [(launch["step"], launch["git"]["commit"][0]) for launch in launches] == [
        (0, "a"),
        (5, "b"),
        (9, "b"),
    ]
    assert all(
        {"started", "command", "versions", "hardware"} <= launch.keys() for launch in launches
    )
    shutil.copytree(run_dir, tmp_path / "runs" / "other")
    arguments = [
        "compare",
        str(tmp_path / "runs"),
        "--baseline",
        "anGPT, plain",
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(arguments) == 0
    assert "aaaaaaaaaa and bbbbbbbbbb" in (tmp_path / "out" / "report.md").read_text()
    assert "different commits of the code" in capsys.readouterr().out


def test_a_run_that_a_callback_ends_names_the_callback(
    shards: Path, tmp_path: Path, caplog
) -> None:
    settings = {"": "EarlyStopping", ".monitor": "val/loss", ".min_delta": 5, ".patience": 1}
    stop = [f"--trainer.callbacks{name or '+'}={value}" for name, value in settings.items()]
    assert main(fit_arguments(shards, tmp_path, *stop, "--trainer.val_check_interval=2")) == 0
    ending = f"4 of {STEPS} steps, by EarlyStopping"
    assert f"{tmp_path} ends after {ending}" in caplog.messages
    assert json.loads((tmp_path / "run.json").read_text())["stopped_early"] == ending


def test_a_moved_run_goes_on_where_it_lies(
    shards: Path, tmp_path: Path, finished: Path, refusal
) -> None:
    """Its config.yaml has the earlier folder. A new run in another folder may use that file."""
    moved, config = tmp_path / "moved", tmp_path / "moved" / "config.yaml"
    shutil.copytree(finished, moved)
    more = ["fit", f"--config={config}", "--ckpt_path=last", "--trainer.max_steps=21"]
    error = refusal(*more)
    assert f"{config} has run_dir={finished}, which is not the run's own folder" in error
    config.write_text(config.read_text().replace(str(finished), str(tmp_path / "left")))
    assert f"give --run_dir {moved}" in refusal(*more)
    assert not (tmp_path / "left").exists()
    for name, steps in (("moved", 21), ("new", 1)):
        assert main([*more, f"--trainer.max_steps={steps}", f"--run_dir={tmp_path / name}"]) == 0
        assert last_checkpoint(tmp_path / name)["global_step"] == steps


def test_a_dev_run_leaves_its_folder_to_a_run(shards: Path, tmp_path: Path) -> None:
    """It is one batch, also if a step has two."""
    dev = fit_arguments(
        shards, tmp_path, "--trainer.fast_dev_run=true", "--trainer.accumulate_grad_batches=2"
    )
    assert main(dev) == 0
    assert [*tmp_path.iterdir()] == []
    assert main(fit_arguments(shards, tmp_path, "--trainer.max_steps=1")) == 0


def test_a_run_that_ran_out_of_time_is_interrupted_and_goes_on(
    shards: Path, tmp_path: Path, monkeypatch
) -> None:
    """Its exit code asks for another start. Each launch has the whole time.

    The clock of this test advances by a second each time it is read.
    """
    clock = SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr("lightning.pytorch.callbacks.timer.time", clock)
    settings = (
        "--trainer.max_steps=-1",
        "--trainer.max_epochs=2",
        "--trainer.limit_train_batches=8",
        "--trainer.max_time=00:00:00:06",
        "--trainer.limit_val_batches=0",
        "--ckpt_path=last",
        "--checkpoint_every_n_steps=100",
    )
    outcomes = []
    for _ in range(3):
        code = main(fit_arguments(shards, tmp_path, *settings))
        status = json.loads((tmp_path / "run.json").read_text())["status"]
        note_start(tmp_path, "local")
        note_end(tmp_path, code)
        outcomes.append(
            (code, status, read_state(tmp_path).status, last_checkpoint(tmp_path)["global_step"])
        )
    interrupted = (PREEMPTED, "interrupted", "interrupted")
    assert outcomes == [(*interrupted, 6), (*interrupted, 12), (0, "finished", "finished", 16)]
