"""Tokens and seconds are counted over the whole run, validation left out."""

import time

import lightning as L
import pytest
import torch

from anlit import GPT
from anlit.training.callbacks import Throughput
from anlit.training.callbacks.throughput import peak_flops
from tests.models.tiny import batches, fit, tiny


def test_tokens_and_seconds_go_on_after_a_resume() -> None:
    counter = Throughput()
    fit(tiny(GPT), max_steps=3, batch_size=4, accumulate=2, callbacks=[counter])
    assert counter.tokens == 3 * 2 * 4 * 16
    assert counter.seconds > 0
    resumed = Throughput()
    resumed.load_state_dict(counter.state_dict())
    fit(tiny(GPT), max_steps=1, callbacks=[resumed])
    assert resumed.tokens == counter.tokens + 4 * 16
    assert resumed.seconds > counter.seconds


def test_validation_does_not_count_as_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        ahead = 0.0

        def perf_counter(self) -> float:
            return time.perf_counter() + self.ahead

    class SlowValidation(L.Callback):
        def on_validation_batch_start(self, *args: object) -> None:
            clock.ahead += 1e6

    clock = Clock()
    monkeypatch.setattr("anlit.training.callbacks.throughput.time", clock)

    counter, model = Throughput(), tiny(GPT)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=4, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, callbacks=[counter, SlowValidation()], val_check_interval=1,
        limit_val_batches=1,
    )  # fmt: skip
    trainer.fit(model, batches(16, 16), batches(4, 16))
    assert counter.tokens == 4 * 4 * 16
    assert clock.ahead == 4e6
    assert counter.seconds < 1e6


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_no_peak_is_claimed_for_a_cpu(precision: str) -> None:
    assert peak_flops(torch.device("cpu"), precision) is None


@pytest.mark.parametrize(
    ("name", "precision", "tera"), [("NVIDIA H200", "bf16-mixed", 989), ("NVIDIA A100-SXM4-80GB", "bf16-true", 312)]
)
def test_peaks_are_dense_data_sheet_values(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, tera: float
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0), precision) == pytest.approx(tera * 1e12, rel=0.01)
