"""The precision of training: of each activation, and bfloat16 alone runs where float16 alone is refused."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

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


def dtypes_of(architecture: Any, precision: str) -> dict[str, set[torch.dtype]]:
    """The dtypes of the inputs and outputs of the second block's parts in a training step."""
    model, dtypes = tiny(architecture), {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            dtypes[f"into {name}"] = {x.dtype for x in arguments if isinstance(x, Tensor) and x.is_floating_point()}
            dtypes[f"out of {name}"] = {output.dtype}

        return hook

    block = model.model.blocks[1]
    for name, module in (("block", block), ("attention", block.attention), ("W_o", block.W_o), ("W_d", block.W_d)):
        module.register_forward_hook(note(name))
    fit(model, 1, precision=precision)
    return dtypes


@architectures
@pytest.mark.parametrize(
    ("precision", "of_h", "of_products"),
    [
        ("32-true", torch.float32, torch.float32),
        ("bf16-mixed", torch.float32, torch.bfloat16),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_dtype_of_h_between_blocks_and_of_the_products(architecture, precision, of_h, of_products) -> None:
    """With bf16-mixed h stays in float32, from the embedding on, and all that the matrices compute is bfloat16."""
    dtypes = dtypes_of(architecture, precision)
    inside = {f"{way} {name}": {of_products} for name in ("attention", "W_o", "W_d") for way in ("into", "out of")}
    assert dtypes == {"into block": {of_h}, "out of block": {of_h}, **inside}
