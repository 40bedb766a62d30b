"""Training of each architecture: the schedule, the mean that validation logs, precision, tied embeddings."""

import math
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from anlit import GPT, AnGPT, MuonAdamW
from anlit.cli import main
from anlit.errors import UserError
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from anlit.nn.models.flops import flops_per_token
from anlit.training.callbacks.norms import NormMonitor
from anlit.training.initial_weights import load_initial_weights
from anlit.training.optim.optimizers import parameter_groups
from anlit.training.optim.schedule import Cosine
from tests.data.modules import collate, quiet_trainer
from tests.nn.models.tiny import (
    SIZE,
    Logged,
    adamw,
    architectures,
    batches,
    fit,
    jolt,
    random_tokens,
    tiny,
)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_rate_peaks_after_warm_up_and_ends_at_final(accumulate: int) -> None:
    logged = Logged("train/learning_rate")
    model = tiny(AnGPT, optimizer=adamw(lr=0.5), schedule=Cosine(0.2, 0.1))
    fit(model, max_steps=10, accumulate=accumulate, callbacks=[logged])
    rates = logged.values["train/learning_rate"]
    assert rates == pytest.approx([0.5 * Cosine(0.2, 0.1).factor(step, 10) for step in range(10)])
    assert (max(rates), rates[-1]) == pytest.approx((0.5, 0.05))


def test_a_schedule_without_an_end_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"max_steps=-1 .*: set trainer\.max_steps or trainer\.max_epochs"
    ):
        fit(tiny(GPT), max_steps=-1, loader=batches(4, 16), max_time="00:00:10:00")


@pytest.mark.parametrize(("second", "mean"), [(4.0, 2.0), (math.nan, math.nan)])
def test_the_validation_loss_is_a_mean_over_targets_and_not_over_batches(
    second: float, mean: float
) -> None:
    """Of NaN too: without the batch the mean would flatter the model."""
    model, batch = tiny(AnGPT), next(iter(batches(4, 16)))
    half = batch._replace(targets=torch.where(torch.arange(16) < 8, batch.targets, IGNORE_INDEX))
    for loss, seen in ((1.0, batch), (second, half)):
        model.loss_of = lambda _, loss=loss: (torch.tensor(loss), None)
        model.validation_step(seen, 0)
    loss, n_targets = model.mean_loss.compute()
    assert loss.item() == pytest.approx(mean, nan_ok=True)
    assert n_targets.item() == 4 * 16 + 4 * 8


class ValidationLosses(L.Callback):
    """The loss of each validation batch, and what is logged of all."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.logged: dict[str, float] = {}

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        with torch.no_grad():
            self.losses.append(float(pl_module.loss_of(batch)[0]))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.logged = {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_a_model_cast_to_bfloat16_is_validated_in_full_precision() -> None:
    """A sum in bfloat16 stops to grow: 600 batches of a loss of 6.617 had a mean of 8.0."""
    seen = ValidationLosses()
    loader = batches(600, 16, batch_size=1)
    trainer = quiet_trainer(precision="bf16-true", callbacks=[seen])
    trainer.validate(tiny(GPT), loader, verbose=False)
    assert len(seen.losses) == 600
    assert seen.logged["val/loss"] == pytest.approx(np.mean(seen.losses), rel=1e-6)


@architectures
def test_what_a_model_cast_to_bfloat16_logs_is_not_rounded_to_bfloat16(architecture: Any) -> None:
    names = ["train/loss", "train/grad_norm"]
    if architecture is not GPT:
        names += ["norms/row_min", "scaling/alpha_A"]
    logged = Logged(*names)
    model = jolt(tiny(architecture, optimizer=adamw(lr=0.01)))
    settings = {"precision": "bf16-true", "log_every_n_steps": 1}
    fit(model, 4, callbacks=[NormMonitor(), logged], **settings)
    for name, values in logged.values.items():
        numbers = torch.tensor(values, dtype=torch.float64)
        rounded = numbers.to(torch.bfloat16).double()
        assert not torch.equal(numbers, rounded), name


def test_a_validation_in_which_no_target_counts_is_refused() -> None:
    loader = DataLoader(list(random_tokens(8, 17)), batch_size=4, collate_fn=without_targets)
    with pytest.raises(UserError, match="no token that was read of the val split counts"):
        quiet_trainer().validate(tiny(GPT), loader, verbose=False)


def test_a_training_in_which_no_target_counts_is_refused() -> None:
    loader = DataLoader(list(random_tokens(8, 17)), batch_size=4, collate_fn=without_targets)
    with pytest.raises(UserError, match="no token of training counted in the loss"):
        fit(tiny(GPT), 2, loader=loader)


def without_targets(rows: list[torch.Tensor]) -> Any:
    batch = collate(rows)
    return batch._replace(targets=torch.full_like(batch.targets, IGNORE_INDEX))


def trained(architecture: Any, precision: str) -> list[float]:
    logged = Logged("train/loss")
    model = tiny(architecture, optimizer=adamw(lr=0.01))
    fit(model, 8, precision=precision, callbacks=[logged], limit_train_batches=1, max_epochs=8)
    assert all(
        parameter.grad is None for parameter in model.parameters()
    )  # beside the next step's activations
    return logged.values["train/loss"]


@architectures
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_bfloat16_trains_as_float32_does(architecture: Any, precision: str) -> None:
    losses, expected = trained(architecture, precision), trained(architecture, "32-true")
    assert losses[-1] < losses[0] - 0.1
    assert losses == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("plugin", [MixedPrecision("16-mixed", "cpu"), HalfPrecision("16-true")])
def test_float16_is_refused(plugin: Any) -> None:
    """Of `precision: 16-mixed` Lightning makes bf16-mixed where there is no GPU."""
    with pytest.raises(
        UserError, match=rf"precision={plugin.precision} .*: set bf16-mixed or 32-true"
    ):
        fit(tiny(GPT), 1, plugins=[plugin])


@architectures
@pytest.mark.parametrize(("precision", "of_h", "of_products"), [
    ("32-true", torch.float32, torch.float32), ("bf16-mixed", torch.float32, torch.bfloat16),
    ("bf16-true", torch.bfloat16, torch.bfloat16),
])  # fmt: skip
def test_the_dtype_of_h_between_blocks_and_of_the_products(
    architecture, precision, of_h, of_products
) -> None:
    """With bf16-mixed h stays in float32, from the embedding on, and all that the matrices compute is bfloat16."""
    model, dtypes = tiny(architecture), {}

    def note(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        tensors = (x for x in (*arguments, output) if isinstance(x, Tensor))
        dtypes[module] = {x.dtype for x in tensors if x.is_floating_point()}

    block = model.model.blocks[1]
    inside = (block.attention, block.W_o, block.W_d)
    for module in (block, *inside):
        module.register_forward_hook(note)
    fit(model, 1, precision=precision)
    assert dtypes == {block: {of_h}, **{module: {of_products} for module in inside}}


def test_a_tied_matrix_is_counted_once_and_trained_at_the_rate_of_the_head() -> None:
    tied, untied = tiny(GPT, tie_embeddings=True), tiny(GPT)
    assert (
        untied.model.n_parameters() - tied.model.n_parameters()
        == SIZE["vocab_size"] * SIZE["d_model"]
    )
    assert flops_per_token(tied.model, 16) == flops_per_token(untied.model, 16)
    optimizer = MuonAdamW(parameter_groups(tied.model), embedding_lr=0.3, head_lr=0.002)
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert (rates.get("embedding"), rates["head"]) == (None, 0.002)


def test_a_tied_run_begins_with_a_tied_export_and_not_with_two_matrices(tmp_path) -> None:
    """The export holds the matrix once."""
    for name, tied in (("two.ckpt", False), ("tied.ckpt", True)):
        model = fit(tiny(GPT, tie_embeddings=tied), 1, default_root_dir=str(tmp_path))
        model.trainer.save_checkpoint(tmp_path / name)
    assert main(["export", str(tmp_path / "tied.ckpt"), "--output", str(tmp_path / "tied")]) == 0
    assert model.model.head.weight is model.model.embedding.weight
    assert "head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    again = tiny(GPT, seed=5, tie_embeddings=True)
    load_initial_weights(again, str(tmp_path / "tied"))
    assert torch.equal(*(each.model.eval()(random_tokens(1, 8)) for each in (again, model)))
    with pytest.raises(
        UserError, match=r"embedding and a head that differ: leave out model\.tie_embeddings"
    ):
        load_initial_weights(again, str(tmp_path / "two.ckpt"))
