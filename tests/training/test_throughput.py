"""Tokens and seconds are counted over the whole run, validation left out."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from anlit import GPT
from anlit.models.flops import flops_per_token
from anlit.training.callbacks import Throughput
from anlit.training.callbacks.throughput import StepTimes, leave_out, peak_flops, peak_memory
from tests.models.tiny import batches, fit, tiny
from tests.training.recorder import Recorder


def test_tokens_and_seconds_go_on_after_a_resume() -> None:
    counter, resumed = Throughput(), Throughput()
    fit(tiny(GPT), max_steps=3, batch_size=4, accumulate=2, callbacks=[counter])
    assert counter.tokens == 3 * 2 * 4 * 16
    resumed.load_state_dict(counter.state_dict())
    fit(tiny(GPT), max_steps=1, callbacks=[resumed])
    assert resumed.tokens == counter.tokens + 4 * 16
    assert resumed.seconds > counter.seconds > 0


class Clock:
    """Time that passes only when somebody lets it."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Passing(L.Callback):
    """Batch i computes for 1 + i seconds, its fetch takes 2 seconds; validation and a measurement take long."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.clock.now += 1 + batch_idx

    def on_validation_batch_start(self, *args: Any) -> None:
        self.clock.now += 1e6


class SlowLoader:
    def __init__(self, clock: Clock, n_batches: int) -> None:
        self.clock, self.inner = clock, batches(4 * n_batches, 16)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.inner:
            self.clock.now += 2
            yield batch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("anlit.training.callbacks.throughput.time", clock)
    return clock


def logged_rows(clock: Clock, n_batches: int, *callbacks: L.Callback, **trainer: Any) -> dict[int, dict[str, float]]:
    """Rows of steps 1 and 3, each of an interval of two steps."""
    recorder = Recorder()
    names = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    L.Trainer(
        accelerator="cpu", max_epochs=1, logger=recorder, num_sanity_val_steps=0, log_every_n_steps=2,
        callbacks=[Throughput(), Passing(clock), *callbacks], limit_val_batches=1, **dict.fromkeys(names, False),
        **trainer,
    ).fit(tiny(GPT), SlowLoader(clock, n_batches), batches(4, 16))  # fmt: skip
    return recorder.rows


def test_step_times_waiting_and_speed_of_each_interval(clock: Clock) -> None:
    """Steps take 3, 4, 5 and 6 seconds, 2 of them waiting; validation is left out."""
    rows = logged_rows(clock, 4, val_check_interval=1)
    expected = {"p50": (3.5, 5.5), "p90": (3.9, 5.9), "p99": (3.99, 5.99)}
    for row, place in ((1, 0), (3, 1)):
        for name, values in expected.items():
            assert rows[row][f"train/step_seconds_{name}"] == pytest.approx(values[place])
    assert rows[1]["train/data_wait_share"] == pytest.approx(4 / 7)
    assert rows[3]["train/data_wait_share"] == pytest.approx(4 / 11)
    assert rows[3]["train/seconds"] == pytest.approx(18)
    assert rows[3]["train/tokens_per_second"] == pytest.approx(2 * 4 * 16 / 11)


def test_a_step_of_several_micro_batches_is_one_step(clock: Clock) -> None:
    """Steps take 3 + 4, 5 + 6, 7 + 8 and 9 + 10 seconds."""
    rows = logged_rows(clock, 8, accumulate_grad_batches=2)
    assert rows[1]["train/step_seconds_p50"] == pytest.approx(9)
    assert rows[3]["train/step_seconds_p50"] == pytest.approx(17)
    assert rows[3]["train/tokens_per_second"] == pytest.approx(4 * 4 * 16 / 34)
    assert rows[3]["train/data_wait_share"] == pytest.approx(8 / 34)


def test_mfu_counts_the_flops_of_the_batches(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anlit.training.callbacks.throughput.peak_flops", lambda device, precision: 1e9)
    flops = flops_per_token(tiny(GPT).model, 16)
    assert logged_rows(clock, 2)[1]["train/mfu"] == pytest.approx(flops * 2 * 4 * 16 / 7 / 1e9)


def test_time_that_is_left_out_is_no_training_time(clock: Clock) -> None:
    class Measures(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            clock.now += 1e6
            leave_out(trainer, 1e6)

    assert logged_rows(clock, 4, Measures())[3]["train/seconds"] == pytest.approx(18)


@pytest.mark.skipif(sys.platform != "linux", reason="compares with /proc")
def test_peak_memory_of_a_cpu_run_is_that_of_the_process() -> None:
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    assert peak_memory(torch.device("cpu"))["train/peak_memory_gb"] == pytest.approx(kib * 1024 / 1e9, rel=0.02)


@pytest.mark.gpu
def test_step_times_of_a_device_are_its_own() -> None:
    """The host queues three products of matrices in no time; the device needs as long for each."""
    times, matrix = StepTimes(torch.device("cuda")), torch.randn(8192, 8192, device="cuda")
    product = matrix @ matrix
    torch.cuda.synchronize()
    times.mark()
    for _ in range(3):
        for _ in range(10):
            torch.mm(matrix, matrix, out=product)
        times.mark()
    seconds = times.take()
    assert len(seconds) == 3
    assert max(seconds) < 2 * min(seconds)
    assert sum(seconds) > 30 * 2 * 8192**3 / 2e15
    assert peak_memory(torch.device("cuda"))["train/peak_memory_gb"] >= 2 * 8192**2 * 4 / 1e9
    assert times.take() == []


@pytest.mark.parametrize(
    ("name", "precision", "tera"), [("NVIDIA H200", "bf16-mixed", 989), ("NVIDIA A100-SXM4-80GB", "bf16-true", 312)]
)
def test_peaks_are_dense_data_sheet_values_and_a_cpu_has_none(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, tera: float
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0), precision) == pytest.approx(tera * 1e12, rel=0.01)
    assert peak_flops(torch.device("cpu"), precision) is None
