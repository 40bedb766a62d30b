"""A sharded model that is validated before its training trains as one that is not."""

from typing import Any
from unittest import mock

import lightning as L
from lightning.pytorch.loops import utilities

from anlit import NGPT
from anlit.training.strategies import FullySharded
from tests.data.modules import quiet_trainer
from tests.data.processes import on_two_devices
from tests.nn.models.tiny import batches, tiny


class Losses(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train/loss"]))


def test_a_model_may_be_validated_before_it_is_trained() -> None:
    expected = on_two_devices(losses_of_rank, validates_first=False)

    assert on_two_devices(losses_of_rank, validates_first=True) == expected


def losses_of_rank(validates_first: bool) -> list[float] | str:
    """The losses of four steps, or the error that ends the run."""
    record = Losses()
    model = tiny(NGPT)
    trainer = quiet_trainer(
        strategy=FullySharded(process_group_backend="gloo"),
        devices=2,
        max_steps=4,
        val_check_interval=2,
        num_sanity_val_steps=0,
        callbacks=[record],
    )
    # With gloo Lightning avoids the inference mode, which it takes with NCCL.
    with mock.patch.object(utilities, "_distributed_is_initialized", return_value=False):
        try:
            if validates_first:
                trainer.validate(model, batches(8, 16), verbose=False)
            trainer.fit(model, batches(32, 16), batches(8, 16))
        except RuntimeError as error:
            return str(error)
    return record.losses
