"""A ramp of the batch inside the Trainer: steps, their micro-batches, and their time."""

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader, IterableDataset

from anlit import GPT
from anlit.training.callbacks import BatchRamp, WholeSteps, progress
from tests.data.modules import collate, quiet_trainer
from tests.nn.models.tiny import batches, random_tokens, tiny

SCHEDULE = {0: 1, 2: 2, 4: 3}
SIZES = [1, 1, 2, 2, 3, 3]
"""The micro-batches of each step."""


class Record(L.Callback):
    """Keeps the first token of each micro-batch, by optimizer step, and the validated steps."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.validated: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, model: Any, batch: Any, *_: Any) -> None:
        tokens_of_step = self.tokens.setdefault(trainer.global_step, [])
        tokens_of_step.append(batch.tokens[0, 0].item())

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.validated.append(trainer.global_step)


class Endless(IterableDataset):
    """Sequences that begin with the tokens 1, 2, 3 …; Lightning fetches a batch in advance."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(1, 29):
            sequence = random_tokens(17)
            sequence[0] = number
            yield sequence


@pytest.mark.parametrize("n_in_epoch", [None, 6, 9])
def test_steps_have_the_micro_batches_of_the_schedule(n_in_epoch: int | None) -> None:
    """Also with data without a length, and over the end of an epoch within the ramp."""
    record = Record()
    data: Any = Endless()
    if n_in_epoch is not None:
        data = list(data)[:n_in_epoch]
    loader = DataLoader(data, batch_size=1, collate_fn=collate)
    trainer = quiet_trainer(
        devices=1,
        accumulate_grad_batches=3,
        max_steps=len(SIZES),
        val_check_interval=4,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[WholeSteps(), BatchRamp(SCHEDULE), record],
    )

    trainer.fit(tiny(GPT), loader, batches(1, 16))

    sizes = [len(tokens) for tokens in record.tokens.values()]
    assert sizes == SIZES
    assert list(record.tokens) == list(range(len(SIZES)))
    assert record.validated == [4, 6]
    if n_in_epoch is None:
        tokens = list(chain(*record.tokens.values()))
        assert tokens == list(range(1, sum(SIZES) + 1)), "no sequence is left out"


class Minutes(L.Callback):
    """A clock. Each micro-batch takes a minute."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def on_train_batch_start(self, *_: Any) -> None:
        self.seconds += 60


def test_the_remaining_time_counts_micro_batches(monkeypatch, capfd) -> None:
    clock = Minutes()
    monkeypatch.setattr(progress, "time", clock)
    trainer = quiet_trainer(
        devices=1,
        accumulate_grad_batches=3,
        max_steps=len(SIZES),
        log_every_n_steps=1,
        enable_progress_bar=True,
        callbacks=[BatchRamp(SCHEDULE), clock, progress.RunProgress()],
    )

    trainer.fit(tiny(GPT), batches(12, 16, batch_size=1))

    printed = capfd.readouterr().out
    steps_and_minutes = re.findall(r"step (\d)/6 .* 0:(\d\d):00 left", printed)
    assert len(steps_and_minutes) == len(SIZES)
    for step, (printed_step, minutes_left) in enumerate(steps_and_minutes, start=1):
        assert int(printed_step) == step
        assert int(minutes_left) == sum(SIZES[step:])
