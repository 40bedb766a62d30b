"""The gradient noise scale against naive gradients, and on a problem with a known value."""

import os
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader

from anlit import GPT, NGPT, AnGPT
from anlit.training.callbacks import GradientNoiseScale
from anlit.training.callbacks.noise_scale import estimates
from anlit.training.strategies import FullySharded
from tests.data.modules import quiet_trainer
from tests.nn.models.tiny import CONSTANT, adamw, batches, fit, jolt, next_token_loss, tiny

N_MICRO_BATCHES = 3
SEQUENCES = 2
"""Sequences of a micro-batch."""
LENGTH = 16


class Estimates(GradientNoiseScale):
    """Keeps each step's two estimates."""

    def __init__(self) -> None:
        super().__init__(every_n_steps=1)
        self.values: list[tuple[float, float]] = []

    def _add(self, squared_gradient: float, trace: float) -> None:
        super()._add(squared_gradient, trace)
        self.values.append((squared_gradient, trace))


def tangential(gradient: Tensor, weight: Tensor, axis: int) -> Tensor:
    """The gradient without its part along each vector of norm 1, vector by vector."""
    tangential_parts = []
    for part, vector in zip(gradient.unbind(1 - axis), weight.unbind(1 - axis), strict=True):
        if vector.norm() >= 0.999:
            radial_length = (part @ vector) / (vector @ vector)
            part = part - radial_length * vector
        tangential_parts.append(part)
    return torch.stack(tangential_parts, 1 - axis)


def naive_gradients(model: Any) -> Tensor:
    """The gradient by all matrices of each micro-batch, by autograd, (micro-batches, N)."""
    weights = [weight for weight in model.model.parameters() if weight.ndim == 2]
    axes = {weight: axis for weight, axis, _ in model.model.constraints()}
    gradients = []
    for batch in batches(N_MICRO_BATCHES * SEQUENCES, LENGTH, SEQUENCES):
        logits = model(batch.tokens, batch.document_ids)
        loss, _ = next_token_loss(logits, batch.targets)
        of_weights = torch.autograd.grad(loss, weights)
        parts = []
        for weight, gradient in zip(weights, of_weights, strict=True):
            if weight in axes:
                gradient = tangential(gradient, weight.detach(), axes[weight])
            parts.append(gradient.flatten())
        gradients.append(torch.cat(parts))
    return torch.stack(gradients)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        (GPT, {}),
        (GPT, {"tie_embeddings": True}),
        (NGPT, {}),
        (AnGPT, {}),
        (NGPT, {"norms": "bounded"}),
    ],
)
def test_a_step_is_measured_as_by_naive_gradients(architecture: Any, settings: dict) -> None:
    model = tiny(architecture, optimizer=adamw(1e-3), schedule=CONSTANT, **settings)
    model = jolt(model).double()
    model.model.restore_norms()
    gradients = naive_gradients(model)
    step = gradients.mean(0)
    # tr Σ by the sample variance of the micro-batches: another formula of the same number.
    variance = gradients.var(0, correction=1).sum().item()
    trace = variance * SEQUENCES * LENGTH
    squared_gradient = step.square().sum().item() - variance / N_MICRO_BATCHES

    values = first_estimates(model)

    assert values == pytest.approx((squared_gradient, trace), rel=1e-9)


def test_the_scale_of_a_scaling_vector_has_no_influence() -> None:
    """It changes how fast s_z learns, and the gradient of what is stored, but no function."""
    estimates_by_scale = []
    for scale in (1.0, 2**-7):
        model = tiny(NGPT, optimizer=adamw(1e-3), schedule=CONSTANT, s_z_scale=scale)
        estimates_by_scale.append(first_estimates(model.double()))
    slow, fast = estimates_by_scale

    assert fast == pytest.approx(slow, rel=1e-9)


def first_estimates(model: Any) -> tuple[float, float]:
    """|G|² and tr Σ, estimated in the first step."""
    measured = Estimates()
    fit(
        model,
        max_steps=1,
        batch_size=SEQUENCES,
        accumulate=N_MICRO_BATCHES,
        precision="64-true",
        callbacks=[measured],
    )
    (values,) = measured.values
    return values


def test_a_sharded_step_after_a_validation_is_measured_as_any_other() -> None:
    """FSDP2 keeps the gathered embedding and head after validation's forward pass."""
    expected = estimates_of_sharded_run(limit_val_batches=0)

    values = estimates_of_sharded_run(limit_val_batches=1)

    assert len(values) == 3
    assert values == pytest.approx(expected, rel=1e-9)


def estimates_of_sharded_run(limit_val_batches: int) -> list[float]:
    """The estimate of |G|² in each of three steps, with or without a validation after each."""
    measured = Estimates()
    with mock.patch.dict(os.environ):  # Lightning sets variables of ranks
        trainer = quiet_trainer(
            strategy=FullySharded(process_group_backend="gloo"),
            devices=1,
            max_steps=3,
            accumulate_grad_batches=2,
            val_check_interval=2,
            limit_val_batches=limit_val_batches,
            num_sanity_val_steps=0,
            callbacks=[measured],
        )
        trainer.fit(tiny(AnGPT), batches(24, LENGTH), batches(4, LENGTH))
    distributed.destroy_process_group()
    return [squared_gradient for squared_gradient, _ in measured.values]


def test_only_vectors_at_their_bound_lose_their_radial_part() -> None:
    model = jolt(tiny(AnGPT)).double()
    model.model.restore_norms()
    norms = torch.cat(list(model.model.row_norms()))

    is_shorter = norms < 0.999
    share = is_shorter.double().mean().item()
    assert 0.1 < share < 0.9, "the test above has both kinds"


D = 5
GRADIENT = torch.tensor([0.3, -0.2, 0.1, 0.0, 0.4], dtype=torch.float64)
DEVIATIONS = torch.tensor([1.0, 2.0, 0.5, 1.5, 1.0], dtype=torch.float64)
TRACE_PER_EXAMPLE = float(DEVIATIONS.square().sum())


class Examples(NamedTuple):
    """A micro-batch of examples x (b, D)."""

    tokens: Tensor


def as_examples(rows: list[Tensor]) -> Examples:
    return Examples(torch.stack(rows))


class Linear(L.LightningModule):
    """The loss ½|w − x|² at w = 0. The gradient of an example is −x: its moments are known."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.w = nn.Parameter(torch.zeros(D, dtype=torch.float64))
        self.model.matrices = lambda: [("w", self.model.w)]
        self.model.constraints = lambda: []
        self.step_loss = SimpleNamespace(factor=1.0)

    def training_step(self, batch: Examples, batch_idx: int) -> Tensor:
        squares = (self.model.w - batch.tokens).square().sum(-1)
        return 0.5 * squares.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_the_mean_of_the_estimates_is_the_known_noise_scale() -> None:
    """The estimates have no bias, though a step has only 3 micro-batches of 2 examples."""
    n_steps = 500
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(n_steps * 3 * 2, D, generator=generator, dtype=torch.float64)
    examples = -(GRADIENT + DEVIATIONS * noise)
    loader = DataLoader(list(examples), batch_size=2, collate_fn=as_examples)
    measured = Estimates()
    trainer = quiet_trainer(
        max_steps=n_steps,
        accumulate_grad_batches=3,
        callbacks=[measured],
        precision="64-true",
    )

    trainer.fit(Linear(), loader)

    values = torch.tensor(measured.values, dtype=torch.float64)
    assert len(values) == n_steps
    squared_gradients, traces = values.T
    # A ratio of each step's norms, or norms without the correction, would be far outside.
    assert_mean(squared_gradients, GRADIENT.square().sum().item(), largest_error=0.3)
    assert_mean(traces, TRACE_PER_EXAMPLE * D, largest_error=0.03)


def assert_mean(values: Tensor, expected: float, largest_error: float) -> None:
    """The mean is within three standard errors, which are at most this share of it."""
    error = values.std().item() / len(values) ** 0.5
    assert values.mean().item() == pytest.approx(expected, abs=3 * error)
    assert error < largest_error * expected


def test_the_averages_are_weighted_means_of_the_estimates() -> None:
    callback = GradientNoiseScale(decay=0.5)

    callback._add(4.0, 8.0)
    callback._add(2.0, 16.0)
    callback._add(-1.0, 32.0)

    squared_gradient = 0.125 * 4 + 0.25 * 2 - 0.5 * 1
    trace = 0.125 * 8 + 0.25 * 16 + 0.5 * 32
    assert callback.squared_gradient == pytest.approx(squared_gradient)
    assert callback.trace == pytest.approx(trace)
    assert callback.weight == pytest.approx(0.125 + 0.25 + 0.5)


def test_equal_gradients_have_no_noise() -> None:
    squared_gradient, trace = estimates(2.0, 2.0, n_micro_batches=4, tokens=8)

    assert squared_gradient == 2.0
    assert trace == 0.0
