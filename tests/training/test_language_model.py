"""Training of each architecture: schedule, mean of a validation, precision, tied embeddings."""

import math
import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from anlit import (
    GPT,
    WSD,
    AnGPT,
    MuonAdamW,
    NoPE,
    PositionsPattern,
    RoPE,
    ScaleInvariant,
    SlidingWindow,
)
from anlit.cli import main
from anlit.errors import UserError
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from anlit.nn.models.flops import flops_per_token
from anlit.training.callbacks.norms import NormMonitor
from anlit.training.initial_weights import load_initial_weights
from anlit.training.optim.optimizers import parameter_groups
from anlit.training.optim.schedule import Constant, Cosine
from tests.data.modules import collate, quiet_trainer
from tests.nn.models.tiny import (
    SIZE,
    Logged,
    adamw,
    architectures,
    batches,
    fit,
    is_normalised,
    jolt,
    random_tokens,
    tiny,
)


def test_settings_that_are_modules_are_saved_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = GPT(**SIZE, positions=RoPE(fraction=0.5))

    assert model.hparams["positions"].fraction == 0.5


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_rate_peaks_after_warm_up_and_ends_at_final(accumulate: int) -> None:
    logged = Logged("train/learning_rate")
    schedule = Cosine(warmup=0.2, final=0.1)
    model = tiny(AnGPT, optimizer=adamw(lr=0.5), schedule=schedule)

    fit(model, max_steps=10, accumulate=accumulate, callbacks=[logged])

    rates = logged.values["train/learning_rate"]
    for step, rate in enumerate(rates):
        assert rate == pytest.approx(0.5 * schedule.factor(step, 10))
    assert len(rates) == 10
    assert max(rates) == pytest.approx(0.5)
    assert rates[-1] == pytest.approx(0.05)


@pytest.mark.parametrize("name", ["optimizer", "schedule"])
def test_none_in_place_of_an_optimizer_or_a_schedule_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"model.{name} is empty: leave it out for the default"):
        tiny(GPT, **{name: None})


NOT_AN_OBJECT = {
    "class": ({"attention": ScaleInvariant}, "attention is the class ScaleInvariant: .* ScaleIn"),
    "text": ({"attention": "ScaleInvariant"}, "attention is the text 'ScaleInvariant': .*t\\(\\)"),
    "positions": ({"positions": NoPE}, r"positions is the class NoPE: give an object, NoPE\(\)"),
    "swapped": ({"attention": NoPE()}, r"attention is NoPE\(\): give an object of Mechanism"),
    "inner": ({"attention": SlidingWindow(4, ScaleInvariant)}, r"attention\.mechanism is the cla"),
    "entry": ({"positions": PositionsPattern([RoPE(), NoPE])}, r"positions\.layers\.1 is the cla"),
    "schedule": ({"schedule": WSD}, r"schedule is the class WSD: give an object, WSD\(\)"),
    "function": ({"schedule": lambda step: 1.0}, "schedule is <function .*: give an object of Sch"),
    "runtime": ({"runtime": {"compile": False}}, "runtime is {'compile': False}: give an object"),
    "optimizer": ({"optimizer": torch.optim.SGD([torch.ones(1)])}, r"groups: SGD\(groups\)"),
    "optimizer's name": ({"optimizer": "AdamW"}, "'AdamW': give a function that makes one"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_AN_OBJECT)
def test_a_class_a_text_or_another_object_in_place_of_an_object_is_refused(case: str) -> None:
    settings, message = NOT_AN_OBJECT[case]

    with pytest.raises(UserError, match=rf"^model\.\w+.*{message}|^model\.{message}"):
        tiny(GPT, **settings)


def test_a_schedule_without_an_end_is_refused() -> None:
    message = r"max_steps=-1 .*: set trainer\.max_steps or trainer\.max_epochs"
    loader = batches(4, 16)

    with pytest.raises(UserError, match=message):
        fit(tiny(GPT), max_steps=-1, loader=loader, max_time="00:00:10:00")


@pytest.mark.parametrize(
    ("loss_of_half", "mean"),
    [
        (4.0, 2.0),
        pytest.param(math.nan, math.nan, id="a NaN stays, or the mean would be too low"),
    ],
)
def test_the_validation_loss_is_a_mean_over_targets_and_not_over_batches(
    loss_of_half: float, mean: float
) -> None:
    """The second batch has half as many targets as the first."""
    model = tiny(AnGPT)
    batch, *_ = batches(4, 16)
    is_first_half = torch.arange(16) < 8
    targets = torch.where(is_first_half, batch.targets, IGNORE_INDEX)
    half = batch._replace(targets=targets)

    validate_with_loss(model, batch, 1.0)
    validate_with_loss(model, half, loss_of_half)

    loss, n_targets = model.mean_loss.take(SingleDeviceStrategy("cpu"))
    assert loss.item() == pytest.approx(mean, nan_ok=True)
    assert n_targets.item() == 4 * 16 + 4 * 8


def validate_with_loss(model: Any, batch: Any, loss: float) -> None:
    model.loss_of = lambda _: (torch.tensor(loss), None)
    model.validation_step(batch, 0)


class ValidationLosses(L.Callback):
    """Keeps the loss of each validation batch, and the logged loss."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.logged_loss = math.nan

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        with torch.no_grad():
            loss, _ = pl_module.loss_of(batch)
        self.losses.append(float(loss))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.logged_loss = trainer.callback_metrics["val/loss"].item()


def test_a_model_cast_to_bfloat16_is_validated_in_full_precision() -> None:
    """A sum in bfloat16 stops to grow: 600 losses of 6.617 had a mean of 8.0.

    After 150 batches the mean is wrong in the second digit.
    """
    validation = ValidationLosses()
    loader = batches(150, 16, batch_size=1)
    trainer = quiet_trainer(precision="bf16-true", callbacks=[validation])

    trainer.validate(tiny(GPT), loader, verbose=False)

    mean = np.mean(validation.losses)
    assert len(validation.losses) == 150
    assert validation.logged_loss == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_are_clipped_by_value_also_with_a_fused_optimizer(precision: Any) -> None:
    sgd = partial(torch.optim.SGD, lr=1.0, fused=True)
    model = tiny(GPT, optimizer=sgd, schedule=Constant())
    before = [weight.detach().clone() for weight in model.parameters()]
    clipping: dict[str, Any] = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}

    fit(model, 1, precision=precision, **clipping)

    changes = []
    for weight, old in zip(model.parameters(), before, strict=True):
        changes.append((weight - old).abs().max().item())
    assert max(changes) == pytest.approx(1e-3, rel=1e-3)


def test_sgd_of_bfloat16_weights_on_a_cpu_has_the_kernel_whose_steps_are_right() -> None:
    """torch's fused SGD is wrong there."""
    for kernel in ({"fused": False}, {"fused": None, "foreach": True}):
        sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, **kernel)
        fit(tiny(GPT, optimizer=sgd), 1, precision="bf16-true")

    fused = partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
    with pytest.raises(UserError, match=r"set --model\.optimizer\.fused false"):
        fit(tiny(GPT, optimizer=fused), 1, precision="bf16-true")


@architectures
def test_a_model_cast_to_bfloat16_logs_values_that_are_not_rounded_to_bfloat16(
    architecture: Any,
) -> None:
    names = ["train/loss", "train/grad_norm"]
    if is_normalised(architecture):
        names += ["norms/row_min", "scaling/alpha_A"]
    logged = Logged(*names)
    model = jolt(tiny(architecture, optimizer=adamw(lr=0.01)))
    callbacks = [NormMonitor(), logged]

    fit(model, 4, callbacks=callbacks, precision="bf16-true", log_every_n_steps=1)

    for name, values in logged.values.items():
        numbers = torch.tensor(values, dtype=torch.float64)
        rounded = numbers.to(torch.bfloat16).double()
        assert not torch.equal(numbers, rounded), name


def test_a_validation_in_which_no_target_counts_is_refused() -> None:
    loader = loader_without_targets()

    with pytest.raises(UserError, match="no token that was read of the val split counts"):
        quiet_trainer().validate(tiny(GPT), loader, verbose=False)


def test_a_training_in_which_no_target_counts_is_refused() -> None:
    loader = loader_without_targets()

    with pytest.raises(UserError, match="no token of training counted in the loss"):
        fit(tiny(GPT), 2, loader=loader)


def loader_without_targets() -> DataLoader:
    rows = list(random_tokens(8, 17))
    return DataLoader(rows, batch_size=4, collate_fn=collate_without_targets)


def collate_without_targets(rows: list[torch.Tensor]) -> Any:
    batch = collate(rows)
    targets = torch.full_like(batch.targets, IGNORE_INDEX)
    return batch._replace(targets=targets)


@cache
def trained(architecture: Any, precision: str) -> tuple[Any, list[float]]:
    """A model and its losses in eight steps on the same batch. No test changes it."""
    logged = Logged("train/loss")
    model = tiny(architecture, optimizer=adamw(lr=0.01))
    same_batch = {"limit_train_batches": 1, "max_epochs": 8}
    fit(model, 8, precision=precision, callbacks=[logged], **same_batch)
    return model, logged.values["train/loss"]


@architectures
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_bfloat16_trains_as_float32_does(architecture: Any, precision: str) -> None:
    _, expected = trained(architecture, "32-true")

    _, losses = trained(architecture, precision)

    assert losses[-1] < losses[0] - 0.1
    assert losses == pytest.approx(expected, rel=0.1)


@architectures
def test_gradients_take_no_memory_beside_the_next_steps_activations(architecture: Any) -> None:
    model, _ = trained(architecture, "32-true")

    for parameter in model.parameters():
        assert parameter.grad is None


@pytest.mark.parametrize("plugin", [MixedPrecision("16-mixed", "cpu"), HalfPrecision("16-true")])
def test_float16_is_refused(plugin: Any) -> None:
    """Lightning turns `precision: 16-mixed` into bf16-mixed on a CPU, so plugins are given."""
    message = rf"precision={plugin.precision} .*: set bf16-mixed or 32-true"
    with pytest.raises(UserError, match=message):
        fit(tiny(GPT), 1, plugins=[plugin])


@architectures
@pytest.mark.parametrize(
    ("precision", "dtype_of_h", "dtype_of_products"),
    [
        ("32-true", torch.float32, torch.float32),
        ("bf16-mixed", torch.float32, torch.bfloat16),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_dtype_of_h_between_blocks_and_of_the_products(
    architecture: Any, precision: str, dtype_of_h: torch.dtype, dtype_of_products: torch.dtype
) -> None:
    """h stays in float32 with bf16-mixed; products are in bfloat16."""
    model = tiny(architecture)
    dtypes: dict[nn.Module, set[torch.dtype]] = {}

    def note(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        dtypes[module] = set()
        for value in (*arguments, output):
            if isinstance(value, Tensor) and value.is_floating_point():
                dtypes[module].add(value.dtype)

    _, block = model.model.blocks
    for module in (block, block.attention, block.W_o, block.W_d):
        module.register_forward_hook(note)

    fit(model, 1, precision=precision)

    assert dtypes == {
        block: {dtype_of_h},
        block.attention: {dtype_of_products},
        block.W_o: {dtype_of_products},
        block.W_d: {dtype_of_products},
    }


def test_a_tied_matrix_is_counted_once_and_trained_at_the_rate_of_the_head() -> None:
    tied = tiny(GPT, tie_embeddings=True)
    untied = tiny(GPT)

    optimizer = MuonAdamW(parameter_groups(tied.model), embedding_lr=0.3, head_lr=0.002)

    n_shared = untied.model.n_parameters() - tied.model.n_parameters()
    assert n_shared == SIZE["vocab_size"] * SIZE["d_model"]
    assert flops_per_token(tied.model, 16) == flops_per_token(untied.model, 16)
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert "embedding" not in rates
    assert rates["head"] == 0.002


def save_trained(folder: Path, name: str, is_tied: bool) -> Any:
    """A model after a step, saved as `name`."""
    model = fit(tiny(GPT, tie_embeddings=is_tied), 1, default_root_dir=str(folder))
    model.trainer.save_checkpoint(folder / name)
    return model


def test_a_tied_run_begins_with_a_tied_export(tmp_path: Path) -> None:
    decoder = save_trained(tmp_path, "tied.ckpt", is_tied=True).model.eval()
    checkpoint = tmp_path / "tied.ckpt"
    export = tmp_path / "tied"
    assert main(["export", str(checkpoint), f"--output={export}"]) == 0
    new_run = tiny(GPT, seed=5, tie_embeddings=True)

    load_initial_weights(new_run, str(export))

    assert decoder.head.weight is decoder.embedding.weight
    assert "head.weight" not in load_file(export / "model.safetensors")
    tokens = random_tokens(1, 8)
    logits = new_run.model.eval()(tokens)
    assert torch.equal(logits, decoder(tokens))


def test_a_tied_run_does_not_begin_with_two_matrices(tmp_path: Path) -> None:
    save_trained(tmp_path, "two.ckpt", is_tied=False)
    tied = tiny(GPT, tie_embeddings=True)

    message = r"embedding and a head that differ: leave out model\.tie_embeddings"
    with pytest.raises(UserError, match=message):
        load_initial_weights(tied, str(tmp_path / "two.ckpt"))
