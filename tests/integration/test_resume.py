"""A run that is stopped at any step and continued ends as if nothing had happened."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.integration.conftest import (
    STEPS,
    assert_same_training_state,
    fit_arguments,
    last_checkpoint,
    logged,
    run,
    start,
    steps_logged,
)


def stop_at(arguments: list[str], run_dir: Path, step: int, number: signal.Signals) -> int | None:
    """Send a signal once step number `step` is logged; the exit code of the run."""
    process = start(arguments)
    deadline = time.monotonic() + 240
    while steps_logged(run_dir) < step and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert process.is_alive(), "the run ended before it could be stopped"
    os.kill(process.pid, number)
    process.join(240)
    return process.exitcode


def interrupted_equals_undisturbed(shards: Path, tmp_path: Path, number: signal.Signals, steps: list[int], *extra: str,
                                   model: str = "AnGPT", whole: Path | None = None) -> None:  # fmt: skip
    """`whole` is the folder of the undisturbed run, None to make one."""
    cut = tmp_path / "cut"
    if whole is None:
        whole = tmp_path / "whole"
        assert run(fit_arguments(shards, whole, *extra, model=model)) == 0
    for step in steps:
        code = stop_at(fit_arguments(shards, cut, *extra, "--ckpt_path=last", model=model), cut, step, number)
        assert code == (1 if number == signal.SIGINT else -number)
    assert run(fit_arguments(shards, cut, *extra, "--ckpt_path=last", model=model)) == 0
    assert last_checkpoint(whole)["global_step"] == STEPS
    assert_same_training_state(last_checkpoint(whole), last_checkpoint(cut))
    assert validation_losses(whole) == validation_losses(cut)


def validation_losses(run_dir: Path) -> dict[int, str]:
    """The later row where a resumed run repeated a step."""
    return dict(logged(run_dir, "val/loss"))


@pytest.fixture(scope="module")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing stops."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run(fit_arguments(shards, run_dir)) == 0
    return run_dir


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.covering(1)
def test_stopped_and_continued_is_identical(
    shards: Path, tmp_path: Path, undisturbed: Path, number: signal.Signals, workers: int
) -> None:
    workers_of_loader = f"--data.num_workers={workers}"
    interrupted_equals_undisturbed(shards, tmp_path, number, [23], workers_of_loader, whole=undisturbed)


def test_dropout_accumulation_and_a_context_schedule_resume_exactly(shards: Path, tmp_path: Path) -> None:
    extra = ("--model.dropout=0.1", "--trainer.accumulate_grad_batches=2", "--data.batch_size=2",
             "--data.context_schedule={0: 16, 23: 32}")  # fmt: skip
    interrupted_equals_undisturbed(shards, tmp_path, signal.SIGKILL, [20], *extra, model="GPT")


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 1), (signal.SIGTERM, 75), pytest.param(signal.SIGUSR1, 75, marks=pytest.mark.slow)],
)
def test_a_signal_loses_no_step_and_says_so(shards: Path, tmp_path: Path, number: signal.Signals, status: int) -> None:
    arguments = fit_arguments(shards, tmp_path / "run", "--checkpoint_every_n_steps=1000")
    assert stop_at(arguments, tmp_path / "run", 12, number) == status
    assert last_checkpoint(tmp_path / "run")["global_step"] >= 13
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["GPT", "NGPT", "AnGPT"])
def test_killed_at_random_moments(shards: Path, tmp_path: Path, model: str) -> None:
    moments = sorted(random.Random(model).sample(range(1, STEPS - 3), 6))
    interrupted_equals_undisturbed(shards, tmp_path, signal.SIGKILL, moments, "--data.num_workers=1", model=model)


@pytest.mark.slow
def test_same_seed_same_run_and_other_seed_other_run(shards: Path, tmp_path: Path, undisturbed: Path) -> None:
    """Fast tests compare every continued run with an undisturbed one of the same seed."""
    for name, seed in (("same", 1), ("other", 8)):
        assert run(fit_arguments(shards, tmp_path / name, f"--seed_everything={seed}")) == 0
    assert_same_training_state(last_checkpoint(undisturbed), last_checkpoint(tmp_path / "same"))
    with pytest.raises(AssertionError):
        assert_same_training_state(last_checkpoint(undisturbed), last_checkpoint(tmp_path / "other"))


@pytest.mark.parametrize(
    ("batch", "validated"),
    [(16, True), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((20, True), (9, False)))],
)
def test_a_stop_is_after_the_validation_that_is_due(
    shards: Path, tmp_path: Path, undisturbed: Path, batch: int, validated: bool
) -> None:
    """Validation is due after batch 16; a stop there must not lose it."""
    cut = tmp_path / "cut"
    callback = ("--trainer.callbacks+=tests.integration.callbacks.SignalAt", f"--trainer.callbacks.batch={batch}")
    assert run(fit_arguments(shards, cut, *callback)) == 1
    assert last_checkpoint(cut)["global_step"] == batch + 1
    assert bool(validation_losses(cut)) is validated
    assert run(fit_arguments(shards, cut, "--ckpt_path=last")) == 0
    assert_same_training_state(last_checkpoint(undisturbed), last_checkpoint(cut))
    assert validation_losses(undisturbed) == validation_losses(cut)
