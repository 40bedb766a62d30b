"""A folder has a single run at a time, and no run starts over another run."""

import shutil
import time
from pathlib import Path

import pytest

from anlit.cli import main
from anlit.errors import PREEMPTED
from anlit.training.run_folder import lock_run_folder
from tests.integration.conftest import (
    KILLED,
    STEPS,
    fit_arguments,
    last_checkpoint,
    run,
    signal_at,
    steps_logged,
)
from tests.integration.ranks import start_ranks
from tests.integration.run_files import contents, file_names, record_of, values


def test_a_second_run_on_the_same_folder_is_refused(shards: Path, tmp_path: Path, refusal) -> None:
    """The first run goes on. A kill frees the folder at once, though data workers live on."""
    run_dir = tmp_path / "run"
    endless = ("--ckpt_path=last", "--data.num_workers=1", "--trainer.max_steps=1000000")
    arguments = fit_arguments(shards, run_dir, *endless)
    (first,) = start_ranks(arguments, 1)
    while steps_logged(run_dir) < 10:
        assert first.is_alive()
        time.sleep(0.01)

    error = refusal(*arguments)

    assert f"run_dir={run_dir} is being trained in by process {first.pid} on " in error
    assert record_of(run_dir)["status"] == "running"
    first.kill()
    first.join()
    last_step = last_checkpoint(run_dir)["global_step"]
    more = ("--ckpt_path=last", f"--trainer.max_steps={last_step + 2}")
    assert main(fit_arguments(shards, run_dir, *more)) == 0


def test_a_folder_that_cannot_be_locked_gives_a_warning(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("anlit.training.run_folder.fcntl.lockf", no_locks)
    lock_run_folder(str(tmp_path)).close()
    assert "without locks" in caplog.text


def test_a_run_that_is_continued_and_is_not_there_says_that_it_starts(
    shards: Path, tmp_path: Path, capfd
) -> None:
    """The name of the folder may be a mistake; jobs give `last` at their first start too."""
    settings = ("--trainer.max_steps=1", "--ckpt_path=last")

    assert main(fit_arguments(shards, tmp_path / "run", *settings)) == 0

    assert "run has no checkpoint: training starts at step 0\n" in capfd.readouterr().out


CHECKPOINTS = ["last.ckpt", "best.ckpt"]


@pytest.mark.parametrize("lost", [["last.ckpt"], CHECKPOINTS, [*CHECKPOINTS, "../run.json"]])
def test_without_last_ckpt_a_run_goes_on_from_its_best_and_is_not_begun_anew(
    shards: Path, tmp_path: Path, finished: Path, lost: list[str], refusal
) -> None:
    run_dir = shutil.copytree(finished, tmp_path / "run")
    for name in lost:
        (run_dir / "checkpoints" / name).unlink()
    contents_before = contents(run_dir)
    last = ("--trainer.max_steps=20", "--ckpt_path=last", "--checkpoint_every_n_steps=100")

    error = refusal(*fit_arguments(shards, run_dir, *last))

    assert "ckpt_path=last finds no checkpoints/last.ckpt" in error
    assert ("best.ckpt" in error) is (len(lost) == 1)
    assert contents(run_dir) == contents_before
    best = fit_arguments(shards, run_dir, "--trainer.max_steps=22", "--ckpt_path=best")
    if len(lost) == 1:
        best_checkpoint = f"{run_dir}/checkpoints/best.ckpt"
        fix = f"continue it with --ckpt_path {best_checkpoint}, or choose another --run_dir"
        assert fix in refusal(*fit_arguments(shards, run_dir))
        assert main(best) == 0
        assert last_checkpoint(run_dir)["global_step"] == 22
    else:
        assert f"ckpt_path={run_dir}/checkpoints/best.ckpt does not exist" in refusal(*best)


def test_a_run_with_weights_alone_from_before_its_first_checkpoint_starts_again(
    shards: Path, tmp_path: Path
) -> None:
    arguments = fit_arguments(
        shards,
        tmp_path,
        "--trainer.max_steps=6",
        "--ckpt_path=last",
        "--trainer.callbacks+=anlit.training.callbacks.StepCheckpoints",
        "--trainer.callbacks.steps=3",
        "--trainer.callbacks.save_weights_only=true",
    )
    assert run([*arguments, *signal_at("SIGKILL", 4)]) == KILLED
    assert file_names(tmp_path / "checkpoints") == {"weights-00000003.ckpt"}

    assert main(arguments) == 0

    assert values(record_of(tmp_path)["launches"], "step") == [0, 0]
    weights = {"weights-00000003.ckpt", "weights-00000006.ckpt"}
    assert file_names(tmp_path / "checkpoints") == {"last.ckpt", "best.ckpt", *weights}


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
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    if name == "checkpoints":
        shutil.copytree(finished / name, run_dir / name)
    elif name == "hpc_ckpt_1.ckpt":  # which Lightning's Slurm writes
        shutil.copy(finished / "checkpoints" / "last.ckpt", run_dir / name)
    else:
        shutil.copy(finished / name, run_dir / name)
    contents_before = contents(run_dir)

    error = refusal(*fit_arguments(shards, run_dir, *options.format(finished).split()))

    assert f"run_dir={run_dir} already holds a run" in error
    assert "continue it with --ckpt_path last, or choose another --run_dir" in error
    assert contents(run_dir) == contents_before


GIT_STATE = "anlit.training.callbacks.run_record.git_state"


def test_each_launch_is_recorded_and_in_comparisons(
    shards: Path, tmp_path: Path, monkeypatch, capsys, caplog
) -> None:
    """A run starts at a commit, and continues at another. A launch without work is not recorded."""
    run_dir = tmp_path / "runs" / "run"
    first = {"commit": "a" * 40, "dirty": False}
    second = {"commit": "b" * 40, "dirty": False}

    def launch(state: dict[str, object], n_steps: int) -> None:
        settings = (f"--trainer.max_steps={n_steps}", "--ckpt_path=last")
        monkeypatch.setattr(GIT_STATE, lambda: state)
        assert main(fit_arguments(shards, run_dir, *settings)) == 0

    launch(first, n_steps=2)
    launch(second, n_steps=3)
    launch(second, n_steps=4)
    launch(first, n_steps=4)
    launch(first, n_steps=1)

    printed = "\n".join(caplog.messages)
    assert printed.count("changed settings") == 2
    for n_steps in (4, 1):
        nothing = f"{run_dir} has its 4 steps (trainer.max_steps={n_steps}): nothing to do; more"
        assert printed.count(nothing) == 1
    launches = record_of(run_dir)["launches"]
    assert values(launches, "step") == [0, 2, 3]
    assert values(launches, "git") == [first, second, second]
    for launch in launches:
        assert {"started", "command", "versions", "hardware"} <= launch.keys()
    shutil.copytree(run_dir, tmp_path / "runs" / "other")
    options = ["--baseline", "anGPT, plain", "--output", str(tmp_path / "out")]
    assert main(["compare", str(tmp_path / "runs"), *options]) == 0
    assert "aaaaaaaaaa and bbbbbbbbbb" in (tmp_path / "out" / "report.md").read_text()
    assert "different commits of the code" in capsys.readouterr().out


def test_a_run_that_a_callback_ends_names_the_callback(
    shards: Path, tmp_path: Path, caplog
) -> None:
    stop = (
        "--trainer.callbacks+=EarlyStopping",
        "--trainer.callbacks.monitor=val/loss",
        "--trainer.callbacks.min_delta=5",
        "--trainer.callbacks.patience=1",
    )

    assert main(fit_arguments(shards, tmp_path, *stop, "--trainer.val_check_interval=2")) == 0

    ending = f"4 of {STEPS} steps, by EarlyStopping"
    assert f"{tmp_path} ends after {ending}" in caplog.messages
    assert record_of(tmp_path)["stopped_early"] == ending


def test_a_run_that_was_stopped_after_its_last_step_ends_without_an_error_on_record(
    shards: Path, tmp_path: Path
) -> None:
    arguments = fit_arguments(shards, tmp_path, "--trainer.max_steps=2")
    assert run([*arguments, *signal_at("SIGTERM", 1)]) == PREEMPTED
    assert record_of(tmp_path)["error"] == "Preempted: "

    assert main([*arguments, "--ckpt_path=last"]) == 0

    record = record_of(tmp_path)
    assert (record["status"], record["error"], record["steps"]) == ("finished", None, 2)


def test_a_moved_run_goes_on_where_it_lies(
    shards: Path, tmp_path: Path, finished: Path, refusal
) -> None:
    """Its config.yaml has the earlier folder. A new run in another folder may use that file."""
    moved = shutil.copytree(finished, tmp_path / "moved")
    config = moved / "config.yaml"
    more = ["fit", f"--config={config}", "--ckpt_path=last", "--trainer.max_steps=21"]
    error = refusal(*more)
    assert f"was moved or copied, because its config.yaml has run_dir={finished}" in error
    config.write_text(config.read_text().replace(str(finished), str(tmp_path / "left")))
    assert f"give --run_dir {moved}" in refusal(*more)
    assert not (tmp_path / "left").exists()
    for name, steps in (("moved", 21), ("new", 1)):
        assert main([*more, f"--trainer.max_steps={steps}", f"--run_dir={tmp_path / name}"]) == 0
        assert last_checkpoint(tmp_path / name)["global_step"] == steps


def test_a_dev_run_leaves_its_folder_to_a_run(shards: Path, tmp_path: Path) -> None:
    """It is a single batch, also if a step has two."""
    dev = fit_arguments(
        shards, tmp_path, "--trainer.fast_dev_run=true", "--trainer.accumulate_grad_batches=2"
    )
    assert main(dev) == 0
    assert [*tmp_path.iterdir()] == []
    assert main(fit_arguments(shards, tmp_path, "--trainer.max_steps=1")) == 0
