"""When validation comes, in optimizer steps, and that a run ends after a whole one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from anlit import GPT
from anlit.errors import UserError
from anlit.training.callbacks import WholeSteps
from anlit.training.callbacks.checkpoints import LastCheckpoint
from tests.data.modules import quiet_trainer
from tests.nn.models.tiny import batches, tiny


class Seen(L.Callback):
    """Notes after how many steps validation came; asks for the run's end after micro-batch `stop_after`."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.validated: list[int] = []
        self.stop_after, self.n_batches = stop_after, 0

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
) -> Seen:
    """Epochs of 12 batches of one sequence, three to an optimizer step."""
    seen, loader = Seen(stop_after), batches(12, 16, batch_size=1)
    whole = {
        "devices": 1,
        "num_sanity_val_steps": 0,
        "accumulate_grad_batches": 3,
        "limit_val_batches": 1,
        **settings,
    }
    own = {"callbacks": [WholeSteps(), seen, *callbacks], "enable_checkpointing": True}
    quiet_trainer(**own, **whole).fit(tiny(GPT), loader, loader, ckpt_path=ckpt_path)
    return seen


@pytest.mark.parametrize(("settings", "expected"), [
    ({"val_check_interval": 5, "check_val_every_n_epoch": None, "max_steps": 11}, [5, 10, 11]),
    ({"val_check_interval": 3, "max_epochs": 2}, [3, 7, 8]),
    ({"val_check_interval": 0.5, "max_epochs": 2}, [2, 4, 6, 8]),
    ({"max_epochs": 2, "check_val_every_n_epoch": 2}, [8]),
    ({"val_check_interval": "00:00:00:00", "check_val_every_n_epoch": None, "max_steps": 3}, [1, 2, 3]),
], ids=["of the run", "of each epoch", "a share", "every second epoch", "a time"])  # fmt: skip
def test_the_interval_counts_optimizer_steps(settings: dict[str, Any], expected: list[int]) -> None:
    assert run(**settings).validated == expected


def test_a_stop_asked_for_within_a_step_comes_after_it() -> None:
    seen = run(stop_after=4, max_steps=20, val_check_interval=5, check_val_every_n_epoch=None)
    assert (seen.n_batches, seen.validated) == (6, [2])


@pytest.mark.parametrize("n_validated", [1, 0])
def test_a_run_that_ended_with_an_epoch_goes_on_with_the_next_one(
    tmp_path: Path, n_validated: int
) -> None:
    """Its last step was validated because it was the last; now no validation is due there."""
    rare = {
        "val_check_interval": 100,
        "check_val_every_n_epoch": None,
        "limit_val_batches": n_validated,
    }
    for n_epochs in (1, 2, 3):
        seen = run(
            callbacks=[LastCheckpoint(str(tmp_path))], ckpt_path="last", max_epochs=n_epochs, **rare
        )
        assert (seen.n_batches, seen.validated) == (12, [4 * n_epochs] * n_validated)


@pytest.mark.parametrize(("settings", "batches_of_epoch"), [
    ({"limit_train_batches": 10}, "1.0 is 10 of the 10"), ({"val_check_interval": 0.4}, "0.4 is 4 of the 12"),
    ({"val_check_interval": 5}, "5 is 15 of the 12"),
])  # fmt: skip
def test_epochs_and_intervals_of_no_whole_steps_are_refused(
    settings: dict[str, Any], batches_of_epoch: str
) -> None:
    with pytest.raises(
        UserError, match=f"val_check_interval={batches_of_epoch} batches of an epoch"
    ):
        run(max_epochs=2, **settings)
