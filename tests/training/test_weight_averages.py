"""Averages of weights equal the formula in float64, and take the weights' place."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from torch import Tensor, distributed
from torch.utils.data import DataLoader

from anlit import GPT, NGPT, AnGPT, ScaleInvariant
from anlit.errors import UserError
from anlit.nn.mechanisms.warm_start import WarmStart
from anlit.nn.models.gpt import GPTDecoder
from anlit.training.callbacks import AttentionStatistics, TailAveraging
from anlit.training.language_model import LanguageModel
from anlit.training.strategies import FullySharded
from anlit.training.weight_averages import averages_of
from tests.data.modules import quiet_trainer
from tests.nn.models.tiny import CONSTANT, adamw, architectures, batches, tiny

STEPS = 9
RATE = 0.03
"""So large that a mean of nGPT's rows is clearly shorter than 1."""
OF_COLUMNS = ("W_o.weight", "W_d.weight")
"""The columns of these matrices of nGPT have norm 1."""
Weights = dict[str, Tensor]


class Trace(L.Callback):
    """Records the weights after each step, and the losses."""

    def __init__(self) -> None:
        self.weights: list[Weights] = []
        self.losses: list[float] = []
        self.val_losses: list[float] = []
        """val/loss of each validation."""
        self.n_averaged: list[float] = []
        """val/averaged_steps of each validation; −1 without this metric."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step > len(self.weights):
            self.weights.append(weights_of(pl_module))
            self.losses.append(float(trainer.callback_metrics["train/loss"]))

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        metrics = trainer.callback_metrics
        self.val_losses.append(float(metrics["val/loss"]))
        self.n_averaged.append(float(metrics.get("val/averaged_steps", -1)))


class Whole(GPTDecoder):
    """A user's decoder with another way to restore norms."""

    def restore_norms(self) -> None:
        torch._foreach_mul_(list(self.parameters()), 0.5)


class Never(WeightAveraging):
    """A user's rule that is never true."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return False


def slow(architecture: Any) -> Any:
    return pytest.param(architecture, marks=pytest.mark.slow)


def weights_of(model: torch.nn.Module) -> Weights:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def train(
    model: LanguageModel, rule: WeightAveraging | None, **options: Any
) -> tuple[L.Trainer, Trace]:
    """Take steps on random tokens and validate every third step."""
    trace = Trace()
    callbacks = [trace] if rule is None else [rule, trace]
    n_micro_batches = options.get("accumulate_grad_batches", 1)
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "val_check_interval": 3 * n_micro_batches,
        "num_sanity_val_steps": 0,
        "callbacks": callbacks,
        **options,
    }
    trainer = quiet_trainer(**settings)
    trainer.fit(model, training_batches(STEPS * n_micro_batches), validation_batches())
    return trainer, trace


def training_batches(n: int = STEPS) -> DataLoader:
    return batches(4 * n, 16)


def validation_batches() -> DataLoader:
    return batches(8, 16)


def saved_by(trainer: L.Trainer, file: Path, weights_only: bool = False) -> dict[str, Any]:
    """The content of a checkpoint that the Trainer saves now."""
    trainer.save_checkpoint(file, weights_only)
    return torch.load(file, weights_only=True)


def small(architecture: Any, **settings: Any) -> LanguageModel:
    return tiny(architecture, optimizer=adamw(RATE), schedule=CONSTANT, **settings)


def naive_averages(steps: list[Weights], shares: list[float], normalised: bool) -> Weights:
    """average ← average + share·(weight − average) in float64; nGPT's vectors to norm 1.

    `shares` has a number for each step in `steps`. The first average is the weight itself.
    """
    averages = {name: weight.double() for name, weight in steps[0].items()}
    for weights, share in zip(steps[1:], shares[1:], strict=True):
        for name, weight in weights.items():
            average = averages[name].lerp(weight.double(), share)
            if normalised and average.dim() == 2:
                axis = 0 if name.endswith(OF_COLUMNS) else 1
                average = average / average.norm(dim=axis, keepdim=True)
            averages[name] = average
    return averages


def assert_moving_average(
    averages: Weights, steps: list[Weights], share: float, normalised: bool = False
) -> None:
    """The averages took in each step's weights with the same share."""
    expected = naive_averages(steps, [share] * len(steps), normalised)
    assert_close(averages, expected)


def assert_mean(averages: Weights, steps: list[Weights], normalised: bool = False) -> None:
    """The averages are the mean of each step's weights."""
    expected = naive_averages(steps, shares_of_mean(len(steps)), normalised)
    assert_close(averages, expected)


def assert_close(actual: Weights, expected: Weights, tolerance: float = 3e-6) -> None:
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        errors = (actual[name].double() - values).abs()
        assert errors.max() < tolerance, name


def ema(decay: float = 0.8, **settings: Any) -> EMAWeightAveraging:
    return EMAWeightAveraging(decay=decay, **settings)


def shares_of_mean(n_weights: int) -> list[float]:
    """The share of each weight when a mean takes it in."""
    return [1 / (n + 1) for n in range(n_weights)]


MOVING_AVERAGES = [
    pytest.param({"decay": 0.8}, range(STEPS), id="of all steps"),
    pytest.param(
        {"decay": 0.8, "update_every_n_steps": 2, "update_starting_at_step": 3},
        (4, 6, 8),
        id="of some steps",
    ),
]
"""Settings, and the steps that count, from 0."""


@pytest.mark.covering(1)
@architectures
@pytest.mark.parametrize(("settings", "steps"), MOVING_AVERAGES)
def test_after_training_the_model_has_the_moving_averages(
    architecture: Any, settings: dict[str, Any], steps: Sequence[int]
) -> None:
    model = small(architecture)

    trainer, trace = train(model, EMAWeightAveraging(**settings))

    weights = [trace.weights[step] for step in steps]
    assert_moving_average(weights_of(model), weights, 0.2, normalised=architecture is NGPT)
    assert averages_of(trainer).n_averaged == len(steps)


MEANS = [
    pytest.param(WeightAveraging, {}, range(STEPS), id="of all steps"),
    pytest.param(TailAveraging, {"share": 0.5}, (5, 6, 7, 8), id="of the tail"),
    pytest.param(
        TailAveraging,
        {"share": 0.7, "every_n_steps": 2},
        (4, 6, 8),
        id="of some steps of the tail",
    ),
]
"""A rule, its settings, and the steps that count, from 0."""


@pytest.mark.covering(1)
@architectures
@pytest.mark.parametrize(("rule", "settings", "steps"), MEANS)
def test_after_training_the_model_has_the_means(
    architecture: Any, rule: Any, settings: dict[str, Any], steps: Sequence[int]
) -> None:
    model = small(architecture)

    trainer, trace = train(model, rule(**settings))

    weights = [trace.weights[step] for step in steps]
    assert_mean(weights_of(model), weights, normalised=architecture is NGPT)
    assert averages_of(trainer).n_averaged == len(steps)


@pytest.mark.parametrize("architecture", [NGPT, AnGPT])
def test_averaged_rows_keep_their_norm_or_bound(architecture: Any) -> None:
    model = small(architecture)

    _, trace = train(model, ema(0.9))

    plain = naive_averages(trace.weights, [0.1] * STEPS, normalised=False)
    plain_norms = plain["model.blocks.0.W_q.weight"].norm(dim=1)
    norms = torch.cat(list(model.model.row_norms()))
    assert plain_norms.min() < 0.99, "the plain mean is shorter"
    assert norms.max() < 1 + 1e-6
    has_unit_norms = bool(norms.min() > 1 - 1e-6)
    assert has_unit_norms == (architecture is NGPT)


@pytest.mark.parametrize("architecture", [NGPT, slow(GPT), slow(AnGPT)])
def test_validation_has_the_averages_and_training_the_weights(architecture: Any) -> None:
    """The run has the losses and weights of a run without averages."""
    _, plain = train(small(architecture), None)
    model = small(architecture)

    trainer, trace = train(model, ema())

    assert trace.losses == plain.losses
    torch.testing.assert_close(trace.weights, plain.weights, rtol=0, atol=0)
    assert trace.n_averaged == [3, 6, 9]
    assert plain.n_averaged == [-1, -1, -1], "no such metric"
    for averaged_loss, loss in zip(trace.val_losses, plain.val_losses, strict=True):
        assert averaged_loss != loss
    (metrics,) = trainer.validate(model, validation_batches())
    assert metrics["val/loss"] == trace.val_losses[-1], "the model has the averages"


def test_before_the_first_average_the_weights_are_validated() -> None:
    _, plain = train(small(NGPT), None)

    _, trace = train(small(NGPT), TailAveraging(share=0.5))

    assert trace.n_averaged == [0, 1, 4]
    assert trace.val_losses[0] == plain.val_losses[0]
    assert trace.val_losses[2] != plain.val_losses[2]


def test_averages_count_optimizer_steps() -> None:
    model = small(NGPT)

    trainer, trace = train(model, ema(), accumulate_grad_batches=3)

    assert averages_of(trainer).n_averaged == STEPS
    assert len(trace.weights) == STEPS
    assert_moving_average(weights_of(model), trace.weights, 0.2, normalised=True)


@pytest.mark.parametrize("architecture", [slow(GPT), NGPT])
def test_averages_of_bfloat16_weights_are_in_float32(architecture: Any, tmp_path: Path) -> None:
    """An average in bfloat16 would not move by a thousandth."""
    trainer, trace = train(small(architecture), ema(0.999), precision="bf16-true")
    saved = saved_by(trainer, tmp_path / "run.ckpt")

    averages = {name: saved["state_dict"][name] for name in trace.weights[0]}
    assert_moving_average(averages, trace.weights, 0.001, normalised=architecture is NGPT)
    head = "model.head.weight"
    assert trace.weights[0][head].dtype == torch.bfloat16
    assert saved["current_model_state"][head].dtype == torch.bfloat16
    assert saved["state_dict"][head].dtype == torch.float32


def test_a_shared_matrix_has_one_average(tmp_path: Path) -> None:
    model = small(GPT, tie_embeddings=True)

    trainer, trace = train(model, ema())
    saved = saved_by(trainer, tmp_path / "run.ckpt")["state_dict"]

    assert model.model.head.weight is model.model.embedding.weight
    assert_moving_average(weights_of(model), trace.weights, 0.2)
    embedding = saved["model.embedding.weight"].untyped_storage()
    head = saved["model.head.weight"].untyped_storage()
    assert head.data_ptr() == embedding.data_ptr()


def test_buffers_are_not_averaged() -> None:
    """The step decides the share of a warm start, and QK-clip's maximum is not a weight."""
    warm_start = WarmStart(ScaleInvariant(), steps=4)
    model = small(GPT, attention=warm_start, qk_clip=0.01)

    _, trace = train(model, WeightAveraging())

    attention = model.model.blocks[0].attention
    assert attention.mechanism.share.item() == 1
    assert not attention.clip.largest.isnan().any()
    assert_mean(weights_of(model), trace.weights)


def test_a_checkpoint_after_training_has_averages_and_weights(tmp_path: Path) -> None:
    trainer, trace = train(small(NGPT), ema())

    saved = saved_by(trainer, tmp_path / "run.ckpt")
    alone = saved_by(trainer, tmp_path / "weights.ckpt", weights_only=True)

    assert_moving_average(saved["state_dict"], trace.weights, 0.2, normalised=True)
    assert_moving_average(alone["state_dict"], trace.weights, 0.2, normalised=True)
    assert_close(saved["current_model_state"], trace.weights[-1], tolerance=1e-30)
    assert "current_model_state" not in alone
    assert saved["averaging_state"] == {"n_averaged": torch.tensor(STEPS), "first_step": 0}


def test_a_longer_run_forgets_the_tail_of_the_shorter_one(tmp_path: Path) -> None:
    """The mean is over the last share of the longer run."""
    trainer, _ = train(small(NGPT), TailAveraging(share=0.5), max_steps=5)
    checkpoint = tmp_path / "short.ckpt"
    trainer.save_checkpoint(checkpoint)
    model = small(NGPT)
    trace = Trace()
    callbacks = [TailAveraging(share=0.5), trace]
    longer = quiet_trainer(max_steps=8, callbacks=callbacks, val_check_interval=3)

    longer.fit(model, training_batches(), validation_batches(), ckpt_path=checkpoint)

    assert averages_of(longer).n_averaged == 3, "steps 5 to 7; step 4 was in the short run"
    assert_mean(weights_of(model), trace.weights[-3:], normalised=True)


def test_a_rule_that_was_never_true_is_reported(caplog) -> None:
    _, plain = train(small(NGPT), None)
    _, trace = train(small(NGPT), Never())

    assert "Never has averaged no step" in caplog.text
    assert trace.val_losses == plain.val_losses


def test_two_averages_are_refused() -> None:
    callbacks = [EMAWeightAveraging(), TailAveraging()]
    trainer = quiet_trainer(max_steps=2, callbacks=callbacks)

    with pytest.raises(UserError, match="EMAWeightAveraging and TailAveraging, and a run has one"):
        trainer.fit(small(GPT), training_batches())


def test_an_average_that_would_begin_after_the_run_is_refused() -> None:
    never = EMAWeightAveraging(update_starting_at_step=STEPS)

    with pytest.raises(UserError, match="update_starting_at_step=9 averages nothing, because"):
        train(small(GPT), never)


def test_a_decoder_with_a_hook_of_its_own_is_refused() -> None:
    model = small(GPT)
    model.model.__class__ = Whole

    with pytest.raises(UserError, match="Whole has a restore_norms of its own, which averages"):
        train(model, EMAWeightAveraging())


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(UserError, match="give more than 0, at most 1"):
        TailAveraging(share=share)


def test_sharded_training_goes_on_with_the_weights_after_validation() -> None:
    """FSDP2 keeps gathered weights after validation's forward pass: they were the averages."""
    expected = losses_of_sharded_run(None)

    losses = losses_of_sharded_run(ema())

    assert losses == expected


def test_a_sharded_model_may_be_used_in_the_step_that_is_averaged() -> None:
    """FSDP2 keeps the gathered head after a forward pass, which is not the head in the averages."""
    expected = losses_of_sharded_run(ema())

    losses = losses_of_sharded_run(ema(), before=[AttentionStatistics(every_n_steps=1)])

    assert losses == expected


def losses_of_sharded_run(
    rule: WeightAveraging | None, before: Sequence[L.Callback] = ()
) -> list[float]:
    """The losses of a run with callbacks `before` the rule."""
    strategy = FullySharded(process_group_backend="gloo", reshard_after_forward=False)
    trace = Trace()
    callbacks = [*before, trace] if rule is None else [*before, rule, trace]
    with mock.patch.dict(os.environ):  # Lightning sets variables of ranks
        train(small(NGPT), None, strategy=strategy, devices=1, callbacks=callbacks)
    distributed.destroy_process_group()
    return trace.losses
