"""The training loop: seeds, the schedule, the mean that validation logs."""

import math

import lightning as L
import pytest
import torch

from anlit import AnGPT
from anlit.optim.schedule import Schedule
from anlit.targets import IGNORED
from tests.models.tiny import adamw, batches, fit, tiny


def test_a_seed_fixes_the_run_to_the_bit() -> None:
    runs: list[dict[str, torch.Tensor]] = []
    for seed in (1, 1, 2):
        L.seed_everything(seed, verbose=False)
        model = AnGPT(vocab_size=29, context_length=16, n_layers=1, n_heads=2, d_model=16, dropout=0.1)
        trained = fit(model, max_steps=3, shuffle=True)
        runs.append({name: parameter.detach().clone() for name, parameter in trained.model.named_parameters()})
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


@pytest.mark.parametrize(("second", "mean"), [(4.0, 2.0), (math.nan, math.nan)])
def test_the_validation_loss_is_a_mean_over_targets_and_not_over_batches(second: float, mean: float) -> None:
    """Of NaN too: torchmetrics would by default leave the batch out of the mean, and so flatter the model."""
    model = tiny(AnGPT)
    batch = next(iter(batches(4, 16)))
    half = batch._replace(targets=torch.where(torch.arange(16) < 8, batch.targets, IGNORED))
    for loss, seen in ((1.0, batch), (second, half)):
        model.loss_of = lambda _, loss=loss: (torch.tensor(loss), None)
        model.validation_step(seen, 0)
    assert model.mean_loss.compute().item() == pytest.approx(mean, nan_ok=True)
