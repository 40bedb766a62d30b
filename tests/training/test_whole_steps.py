"""Validation counts optimizer steps, and a run ends after a whole step."""

import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy

from anlit import GPT
from anlit.errors import UserError
from anlit.signals import ENDING_SIGNALS
from anlit.training.callbacks import WholeSteps, progress
from anlit.training.callbacks.checkpoints import LastCheckpoint
from tests.data.modules import quiet_trainer
from tests.nn.models.tiny import batches, tiny


class Record(L.Callback):
    """Keeps the validated steps; stops the run after micro-batch `stop_after`."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.validated: list[int] = []
        self.stop_after = stop_after
        self.n_batches = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.n_batches += 1
        trainer.should_stop |= self.n_batches == self.stop_after

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.validated.append(trainer.global_step)


def run(
    stop_after: int | None = None,
    callbacks: Sequence[L.Callback] = (),
    ckpt_path: str | None = None,
    **settings: Any,
) -> Record:
    """Train in epochs of 12 batches of a sequence, three for an optimizer step."""
    record = Record(stop_after)
    loader = batches(12, 16, batch_size=1)
    defaults = {
        "devices": 1,
        "num_sanity_val_steps": 0,
        "accumulate_grad_batches": 3,
        "limit_val_batches": 1,
        "enable_checkpointing": True,
    }
    callbacks = [WholeSteps(), record, *callbacks]
    trainer = quiet_trainer(**defaults | settings, callbacks=callbacks)
    trainer.fit(tiny(GPT), loader, loader, ckpt_path=ckpt_path)
    return record


OF_THE_RUN = {"val_check_interval": 5, "check_val_every_n_epoch": None, "max_steps": 11}
OF_EACH_EPOCH = {"val_check_interval": 3, "max_epochs": 2}
SHARE_OF_EPOCH = {"val_check_interval": 0.5, "max_epochs": 2}
SECOND_EPOCH = {"max_epochs": 2, "check_val_every_n_epoch": 2}
TIME = {"val_check_interval": "00:00:00:00", "check_val_every_n_epoch": None, "max_steps": 3}


@pytest.mark.parametrize(
    ("settings", "validated"),
    [
        pytest.param(OF_THE_RUN, [5, 10, 11], id="of the run"),
        pytest.param(OF_EACH_EPOCH, [3, 7, 8], id="of each epoch"),
        pytest.param(SHARE_OF_EPOCH, [2, 4, 6, 8], id="a share"),
        pytest.param(SECOND_EPOCH, [8], id="every second epoch"),
        pytest.param(TIME, [1, 2, 3], id="a time"),
    ],
)
def test_the_interval_counts_optimizer_steps(
    settings: dict[str, Any], validated: list[int]
) -> None:
    assert run(**settings).validated == validated


def test_a_rank_asks_others_as_often_whether_or_not_its_line_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks whose clocks differ would wait for each other for ever."""
    answers_by_seconds = {}
    for seconds_between_lines in (-1.0, float("inf")):
        monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", seconds_between_lines)
        answers: list[bool] = []
        broadcast = staticmethod(partial(answer, answers))
        monkeypatch.setattr(SingleDeviceStrategy, "broadcast", broadcast)
        settings = {**TIME, "val_check_interval": "01:00:00:00", "log_every_n_steps": 1}

        run(callbacks=[progress.RunProgress()], enable_progress_bar=True, **settings)

        answers_by_seconds[seconds_between_lines] = answers

    of_rank_whose_line_is_due, of_other_rank = answers_by_seconds.values()
    assert of_other_rank == [False, False, True], "once a step; the last is validated"
    assert of_rank_whose_line_is_due == of_other_rank


def answer(answers: list[bool], obj: Any, src: int = 0) -> Any:
    """Stand in for `Strategy.broadcast`, and note the truth values."""
    if isinstance(obj, bool):
        answers.append(obj)
    return obj


def test_a_stop_within_a_step_comes_after_it() -> None:
    record = run(stop_after=4, max_steps=20, val_check_interval=5, check_val_every_n_epoch=None)

    assert record.n_batches == 6
    assert record.validated == [2]


@pytest.mark.parametrize("n_validated", [1, 0])
def test_a_run_that_ended_with_an_epoch_continues_with_the_next_epoch(
    tmp_path: Path, n_validated: int
) -> None:
    """Its last step was validated already: a later launch does not validate there again."""
    settings = {
        "val_check_interval": 100,
        "check_val_every_n_epoch": None,
        "limit_val_batches": n_validated,
    }
    for n_epochs in (1, 2, 3):
        callbacks = [LastCheckpoint(str(tmp_path))]

        record = run(callbacks=callbacks, ckpt_path="last", max_epochs=n_epochs, **settings)

        assert record.n_batches == 12
        assert record.validated == [4 * n_epochs] * n_validated


def test_signals_are_handled_after_a_run_as_before(tmp_path: Path) -> None:
    """Lightning would leave SIGTERM to its own handler, which ends no process."""
    handlers = list(map(signal.getsignal, ENDING_SIGNALS))

    run(callbacks=[LastCheckpoint(str(tmp_path))], max_epochs=1)

    assert list(map(signal.getsignal, ENDING_SIGNALS)) == handlers


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit_train_batches": 10}, "val_check_interval=1.0 is 10 of the 10 batches of an epoch"),
        ({"val_check_interval": 0.4}, "val_check_interval=0.4 is 4 of the 12 batches of an epoch"),
        ({"val_check_interval": 5}, "val_check_interval=5 is 15 of the 12 batches of an epoch"),
    ],
)
def test_epochs_and_intervals_that_split_a_step_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(max_epochs=2, **settings)
