"""`max_time` ends a launch, not a run: the run is interrupted and goes on with the next launch."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from anlit.cli import main
from anlit.errors import PREEMPTED
from anlit.study.state import note_end, note_start, read_state
from tests.integration.conftest import (
    STEPS,
    Train,
    assert_same_curves,
    assert_same_training_state,
    fit_arguments,
    last_checkpoint,
    signal_at,
)
from tests.integration.run_files import record_of, values


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of Lightning's Timer advances by a second each time it is read."""
    clock = SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr("lightning.pytorch.callbacks.timer.time", clock)


def test_a_run_that_ran_out_of_time_is_interrupted_and_goes_on(
    shards: Path, tmp_path: Path
) -> None:
    """Its exit code asks for another start. Each launch has the whole time."""
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
        status = record_of(tmp_path)["status"]
        note_start(tmp_path, "local")
        note_end(tmp_path, code)
        status_for_study = read_state(tmp_path).status
        n_steps = last_checkpoint(tmp_path)["global_step"]
        outcomes.append((code, status, status_for_study, n_steps))
    assert outcomes == [
        (PREEMPTED, "interrupted", "interrupted", 6),
        (PREEMPTED, "interrupted", "interrupted", 12),
        (0, "finished", "finished", 16),
    ]


def test_a_run_of_several_launches_has_the_validations_of_one_launch(
    shards: Path, tmp_path: Path, trained: Train
) -> None:
    """The end of a launch's time adds no validation and no row."""
    settings = (
        "--trainer.max_steps=10",
        "--trainer.val_check_interval=4",
        "--trainer.log_every_n_steps=3",
        "--checkpoint_every_n_steps=100",
    )
    whole = trained(*settings)
    launch = fit_arguments(
        shards, tmp_path, *settings, "--trainer.max_time=00:00:00:06", "--ckpt_path=last"
    )

    codes = [main(launch) for _ in range(4)]

    assert {*codes} == {PREEMPTED, 0}
    assert codes == sorted(codes, reverse=True)
    assert values(record_of(tmp_path)["launches"], "step")[-1] not in (0, 4, 8)
    assert_same_training_state(last_checkpoint(whole), last_checkpoint(tmp_path))
    assert_same_curves(whole, tmp_path)


@pytest.mark.parametrize("ending", [["--trainer.max_time=00:00:00:05"], signal_at("SIGTERM", 3)])
def test_a_run_that_a_callback_ends_is_finished_if_its_time_or_a_signal_ends_it_too(
    ending: list[str], shards: Path, tmp_path: Path
) -> None:
    stop = [
        "--trainer.callbacks+=EarlyStopping",
        "--trainer.callbacks.monitor=val/loss",
        "--trainer.callbacks.stopping_threshold=100",
    ]
    settings = ["--trainer.val_check_interval=4", *ending, *stop]

    assert main(fit_arguments(shards, tmp_path, *settings)) == 0

    record = record_of(tmp_path)
    assert (record["status"], record["steps"]) == ("finished", 4)
    assert record["stopped_early"] == f"4 of {STEPS} steps, by EarlyStopping"


def test_the_end_of_the_time_is_told_once_if_min_steps_are_left(
    shards: Path, tmp_path: Path, caplog
) -> None:
    least = ["--trainer.min_steps=6", "--trainer.min_epochs=0"]
    arguments = fit_arguments(shards, tmp_path, *least, "--trainer.max_time=00:00:00:01")

    assert main(arguments) == PREEMPTED
    assert record_of(tmp_path)["steps"] == 6
    assert caplog.text.count("Time limit reached") == 1


def test_a_timer_of_epochs_ends_a_launch_after_an_epoch(shards: Path, tmp_path: Path) -> None:
    settings = (
        "--trainer.max_steps=7",
        "--trainer.limit_train_batches=3",
        "--trainer.limit_val_batches=0",
        "--ckpt_path=last",
        "--trainer.callbacks+=Timer",
        "--trainer.callbacks.duration=00:00:00:02",
        "--trainer.callbacks.interval=epoch",
    )
    launch = fit_arguments(shards, tmp_path, *settings)
    outcomes = []
    for _ in range(2):
        code = main(launch)
        outcomes.append((code, record_of(tmp_path)["status"], record_of(tmp_path)["steps"]))
    assert outcomes == [(PREEMPTED, "interrupted", 6), (0, "finished", 7)]


@pytest.mark.parametrize("min_steps", [2, 9])
def test_the_time_ends_a_launch_after_min_steps_and_not_after_the_first_epoch(
    shards: Path, tmp_path: Path, min_steps: int
) -> None:
    """With `min_steps` Lightning takes `min_epochs: 1`, and an epoch of a stream has no end."""
    settings = (
        f"--trainer.min_steps={min_steps}",
        "--trainer.max_time=00:00:00:06",
        "--trainer.limit_val_batches=0",
    )

    assert main(fit_arguments(shards, tmp_path, *settings)) == PREEMPTED

    assert min_steps <= last_checkpoint(tmp_path)["global_step"] < STEPS
