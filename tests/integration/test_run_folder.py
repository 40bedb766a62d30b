"""One run in a folder at a time, and none that begins anew over another."""

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
from tests.integration.ranks import ends_of_ranks, start_ranks


def test_a_second_run_on_the_same_folder_is_refused(shards: Path, tmp_path: Path) -> None:
    """The first goes on undisturbed; after a kill the folder is free at once, though a loader's workers live on."""
    run_dir = tmp_path / "run"
    arguments = fit_arguments(
        shards, run_dir, "--ckpt_path=last", "--data.num_workers=1", "--trainer.max_steps=2000"
    )
    (first,) = start_ranks(arguments, 1)
    while steps_logged(run_dir) < 10:
        assert first.is_alive()
        time.sleep(0.01)
    (code,), (said,) = ends_of_ranks(arguments, 1, tmp_path / "log")
    assert code == 2
    assert f"run_dir={run_dir} is being trained in by process {first.pid} on " in said
    assert "Traceback" not in said
    assert json.loads((run_dir / "run.json").read_text())["status"] == "running"
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    assert run(fit_arguments(shards, run_dir, "--ckpt_path=last", "--trainer.max_steps=12")) == 0


def test_a_folder_that_cannot_be_locked_is_said(tmp_path: Path, monkeypatch, caplog) -> None:
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
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    late = "--checkpoint_every_n_steps=100"
    said = refusal(
        *fit_arguments(shards, run_dir, "--trainer.max_steps=20", "--ckpt_path=last", late)
    )
    assert "ckpt_path=last finds no checkpoints/last.ckpt" in said
    assert ("best.ckpt" in said) is (len(lost) == 1)
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    best = fit_arguments(shards, run_dir, "--trainer.max_steps=22", "--ckpt_path=best")
    if len(lost) == 1:
        fix = f"continue it with --ckpt_path {run_dir}/checkpoints/best.ckpt, or choose another --run_dir"
        assert fix in refusal(*fit_arguments(shards, run_dir))
        assert run(best) == 0
        assert last_checkpoint(run_dir)["global_step"] == 22
    else:
        assert f"ckpt_path={run_dir}/checkpoints/best.ckpt does not exist" in refusal(*best)


OTHER = "--ckpt_path={}/checkpoints/last.ckpt"


@pytest.mark.parametrize(("kept", "begun"), [
    ("metrics.csv", ""), ("config.yaml", ""), ("checkpoints", ""), ("checkpoints", OTHER), ("run.json", OTHER),
    ("hpc_ckpt_1.ckpt", ""),
])  # fmt: skip
def test_a_folder_with_files_of_a_run_is_continued_from_its_own_checkpoints_alone(
    shards: Path, tmp_path: Path, finished: Path, kept: str, begun: str, refusal
) -> None:
    (run_dir := tmp_path / "run").mkdir()
    source = finished / (
        "checkpoints/last.ckpt" if "hpc" in kept else kept
    )  # which Lightning's Slurm writes
    (shutil.copytree if kept == "checkpoints" else shutil.copy)(source, run_dir / kept)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    said = refusal(*fit_arguments(shards, run_dir, *begun.format(finished).split()))
    assert f"run_dir={run_dir} already holds a run" in said
    assert "continue it with --ckpt_path last, or choose another --run_dir" in said
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_each_launch_is_recorded_and_in_comparisons(
    shards: Path, tmp_path: Path, monkeypatch, capsys, caplog
) -> None:
    """Begun at one commit, continued twice at another; a launch that finds nothing to do is none, and says so."""
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
    said = [
        message
        for message in caplog.messages
        if "nothing to do" in message or "changed settings" in message
    ]
    more = "nothing to do; more come with --trainer.max_steps N"
    assert said[2:] == [
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
    given = [
        "compare",
        str(tmp_path / "runs"),
        "--baseline",
        "anGPT, plain",
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(given) == 0
    assert "aaaaaaaaaa and bbbbbbbbbb" in (tmp_path / "out" / "report.md").read_text()
    assert "different commits of the code" in capsys.readouterr().out


def test_a_run_that_a_callback_ends_says_so(shards: Path, tmp_path: Path, caplog) -> None:
    settings = {"": "EarlyStopping", ".monitor": "val/loss", ".min_delta": 5, ".patience": 1}
    stop = [f"--trainer.callbacks{name or '+'}={value}" for name, value in settings.items()]
    assert main(fit_arguments(shards, tmp_path, *stop, "--trainer.val_check_interval=2")) == 0
    said = f"4 of {STEPS} steps, by EarlyStopping"
    assert f"{tmp_path} ends after {said}" in caplog.messages
    assert json.loads((tmp_path / "run.json").read_text())["stopped_early"] == said


def test_a_moved_run_goes_on_where_it_lies(
    shards: Path, tmp_path: Path, finished: Path, refusal
) -> None:
    """Its config.yaml has the place where it lay. A new run, with another folder, may begin with that file."""
    moved, config = tmp_path / "moved", tmp_path / "moved" / "config.yaml"
    shutil.copytree(finished, moved)
    more = ["fit", f"--config={config}", "--ckpt_path=last", "--trainer.max_steps=21"]
    said = refusal(*more)
    assert (
        f"{config} has run_dir={finished}, which is not the run's own folder" in said
    )  # not that one trains
    config.write_text(config.read_text().replace(str(finished), str(tmp_path / "left")))
    assert f"give --run_dir {moved}" in refusal(*more)
    assert not (tmp_path / "left").exists()
    for name, steps in (("moved", 21), ("new", 1)):
        assert main([*more, f"--trainer.max_steps={steps}", f"--run_dir={tmp_path / name}"]) == 0
        assert last_checkpoint(tmp_path / name)["global_step"] == steps


def test_a_dev_run_leaves_its_folder_to_a_run(shards: Path, tmp_path: Path) -> None:
    """It is one batch, also where a step has two."""
    dev = fit_arguments(
        shards, tmp_path, "--trainer.fast_dev_run=true", "--trainer.accumulate_grad_batches=2"
    )
    assert main(dev) == 0
    assert [*tmp_path.iterdir()] == []
    assert main(fit_arguments(shards, tmp_path, "--trainer.max_steps=1")) == 0


def test_a_run_that_ran_out_of_time_is_interrupted_and_goes_on(
    shards: Path, tmp_path: Path, monkeypatch
) -> None:
    """Its exit code asks for another start. Each launch has the whole time; here a clock tells a second more whenever
    it is read."""
    clock = SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr("lightning.pytorch.callbacks.timer.time", clock)
    settings = ("--trainer.max_steps=-1", "--trainer.max_epochs=2", "--trainer.limit_train_batches=8",
                "--trainer.max_time=00:00:00:06", "--trainer.limit_val_batches=0", "--ckpt_path=last",
                "--checkpoint_every_n_steps=100")  # fmt: skip
    ends = []
    for _ in range(3):
        code = main(fit_arguments(shards, tmp_path, *settings))
        status = json.loads((tmp_path / "run.json").read_text())["status"]
        note_start(tmp_path, "local")
        note_end(tmp_path, code)
        ends.append(
            (code, status, read_state(tmp_path).status, last_checkpoint(tmp_path)["global_step"])
        )
    interrupted = (PREEMPTED, "interrupted", "interrupted")
    assert ends == [(*interrupted, 6), (*interrupted, 12), (0, "finished", "finished", 16)]
