"""Every step is once in the logs, whether a run was killed between a row and its checkpoint or the other way round."""

import signal
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from anlit.checkpoints.checkpoint_io import AtomicCheckpointIO
from anlit.training.loggers import CSVLogger
from tests.integration.conftest import die_at, fit_arguments, logged, run, steps_logged

STEPS = 30
SHORT = (f"--trainer.max_steps={STEPS}", "--ckpt_path=last")


def rows_of(run_dir: Path) -> list[list[tuple[int, str]]]:
    return [logged(run_dir, name) for name in ("train/loss", "train/learning_rate", "val/loss")]


@pytest.fixture(scope="module")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    assert run(fit_arguments(shards, run_dir, *SHORT)) == 0
    return run_dir


@pytest.mark.parametrize(
    ("owner", "name", "call", "last"),
    [
        pytest.param(CSVLogger, "log_metrics", 16, 14, id="the checkpoint of step 16 is there and its row is not"),
        pytest.param(
            AtomicCheckpointIO,
            "save_checkpoint",
            2,
            14,
            id="rows of 7 steps are there and no checkpoint",
            marks=pytest.mark.slow,
        ),
        pytest.param(AtomicCheckpointIO, "save_checkpoint", 3, 16, id="a validation is there and no checkpoint"),
    ],
)
def test_every_step_is_logged_once(
    shards: Path, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch,
    owner: Any, name: str, call: int, last: int,
) -> None:  # fmt: skip
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        die_at(patch, owner, name, call)
        assert run(fit_arguments(shards, run_dir, *SHORT)) == -signal.SIGKILL
    assert steps_logged(run_dir) == last
    assert run(fit_arguments(shards, run_dir, *SHORT)) == 0
    assert rows_of(run_dir) == rows_of(undisturbed)
    events = EventAccumulator(str(run_dir)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [*range(STEPS)]


def test_a_signal_loses_no_row(shards: Path, tmp_path: Path, undisturbed: Path) -> None:
    run_dir = tmp_path / "run"
    callback = ("--trainer.callbacks+=tests.integration.callbacks.SignalAt", "--trainer.callbacks.batch=11")
    assert run(fit_arguments(shards, run_dir, *SHORT, *callback)) == 1
    assert run(fit_arguments(shards, run_dir, *SHORT)) == 0
    assert rows_of(run_dir) == rows_of(undisturbed)
