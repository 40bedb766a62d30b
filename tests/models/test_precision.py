"""What a model is trained in: bfloat16 alone runs, float16 alone is refused."""

from typing import Any

import lightning as L
import pytest

from anlit.errors import UserError
from tests.models.tiny import ARCHITECTURES, adamw, fit, tiny

architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)


class Losses(L.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.values.append(float(trainer.callback_metrics["train/loss"]))


def trained(architecture: Any, precision: str) -> list[float]:
    losses = Losses()
    model = tiny(architecture, optimizer=adamw(lr=0.01))
    fit(model, 8, precision=precision, callbacks=[losses], limit_train_batches=1, max_epochs=8)
    return losses.values


@architectures
def test_bfloat16_alone_trains_as_float32_does(architecture: Any) -> None:
    losses, expected = trained(architecture, "bf16-true"), trained(architecture, "32-true")
    assert losses[-1] < losses[0] - 0.1
    assert losses == pytest.approx(expected, rel=0.03)


@architectures
def test_float16_alone_is_refused(architecture: Any) -> None:
    with pytest.raises(UserError, match=r"precision=16-true .*: set bf16-mixed, 16-mixed or 32-true"):
        trained(architecture, "16-true")
