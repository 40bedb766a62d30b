"""The training loop's arithmetic: the loss, gradient accumulation, seeds, and the schedule's end."""

import math

import lightning as L
import pytest
import torch

from anlit import AnGPT
from anlit.models.language_model import LanguageModel
from anlit.optim.schedule import Schedule
from anlit.targets import IGNORED
from tests.layers.from_logits import next_token_loss
from tests.models.tiny import ARCHITECTURES, adamw, batches, fit, random_tokens, tiny

architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)


def weights(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.model.named_parameters()}


def naive_loss(logits: torch.Tensor, targets: torch.Tensor, z_loss: float) -> torch.Tensor:
    terms = []
    for row, target in zip(logits.flatten(0, 1), targets.flatten().tolist(), strict=True):
        if target != IGNORED:
            log_z = torch.log(torch.exp(row).sum())
            terms.append(log_z - row[target] + z_loss * log_z**2)
    return sum(terms) / len(terms)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_loss_and_its_gradient_are_the_mean_over_counted_targets(z_loss) -> None:
    logits = 3 * torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = random_tokens(2, 5, vocab_size=7)
    targets[0, 3] = targets[1, 0] = IGNORED
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, objective = next_token_loss(ours, targets, z_loss)
    expected = naive_loss(theirs, targets, z_loss)
    torch.testing.assert_close(loss, naive_loss(logits, targets, 0.0), rtol=1e-12, atol=0)
    torch.testing.assert_close(objective, expected, rtol=1e-12, atol=0)
    objective.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
    assert ours.grad[0, 3].abs().max() == ours.grad[1, 0].abs().max() == 0


def test_loss_of_half_precision_logits_is_taken_in_float32() -> None:
    logits = torch.zeros(1, 8, 50_304, dtype=torch.bfloat16)
    loss, _ = next_token_loss(logits, random_tokens(1, 8))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(50_304), rel=1e-6)


@architectures
def test_a_seed_fixes_the_run_to_the_bit(architecture) -> None:
    runs = []
    for seed in (1, 1, 2):
        L.seed_everything(seed, verbose=False)
        model = architecture(vocab_size=29, context_length=16, n_layers=1, n_heads=2, d_model=16, dropout=0.1)
        runs.append(weights(fit(model, max_steps=3, shuffle=True)))
    first, again, other = runs
    for name, weight in first.items():
        assert torch.equal(weight, again[name]), name
        assert not torch.equal(weight, other[name]), name


@pytest.mark.parametrize("length", [{"max_steps": 10}, {"max_steps": 10, "accumulate": 2}])
def test_the_rate_peaks_after_warm_up_and_ends_at_final(length) -> None:
    rates = []

    class Rates(L.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
            rates.append({group["lr"] for group in optimizer.param_groups})

    fit(tiny(AnGPT, optimizer=adamw(lr=0.5), schedule=Schedule(0.2, 0.1)), callbacks=[Rates()], **length)
    assert len(rates) == 10
    assert all(len(rate) == 1 for rate in rates)
    values = [rate.pop() for rate in rates]
    assert values[:2] == pytest.approx([0.25, 0.5])
    assert values[-1] == pytest.approx(0.05)
    assert values[2:] == sorted(values[2:], reverse=True)


def test_a_batch_without_a_counted_target_has_no_loss_and_no_gradient() -> None:
    logits = torch.randn(1, 3, 5, requires_grad=True)
    loss, objective = next_token_loss(logits, torch.full((1, 3), -100), z_loss=0.1)
    objective.backward()
    assert loss.item() == objective.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_the_validation_loss_is_a_mean_over_targets_and_not_over_batches() -> None:
    model = tiny(AnGPT)
    batch = next(iter(batches(4, 16)))
    half = batch._replace(targets=torch.where(torch.arange(16) < 8, batch.targets, IGNORED))
    for loss, seen in ((1.0, batch), (4.0, half)):
        model.loss_of = lambda _, loss=loss: (torch.tensor(loss), None)
        model.validation_step(seen, 0)
    assert model.mean_loss.compute().item() == pytest.approx(2.0)


def test_a_validation_loss_that_is_not_a_number_is_shown() -> None:
    """torchmetrics would by default leave the batch out of the mean, and so flatter the model."""
    model = tiny(AnGPT)
    batch = next(iter(batches(4, 16)))
    for loss in (1.0, math.nan):
        model.loss_of = lambda _, loss=loss: (torch.tensor(loss), None)
        model.validation_step(batch, 0)
    assert model.mean_loss.compute().isnan()
