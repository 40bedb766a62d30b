"""Tokens and seconds of each interval, validation left out; tests/integration/test_resume.py has a resumed count."""

import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from anlit import GPT
from anlit.io.read import read_rows
from anlit.nn.models.flops import flops_per_token
from anlit.training.callbacks import Throughput
from anlit.training.callbacks.throughput import StepTimes, measuring, peak_flops
from anlit.training.loggers import MetricsCSV
from tests.data.modules import quiet_trainer
from tests.nn.models.tiny import batches, tiny

FLOPS = flops_per_token(tiny(GPT).model, 16)


class Passing(L.Callback):
    """Time passes here alone: batch i computes for 1 + i seconds, its fetch takes 2; validation and measuring long."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def slowly(self, loader: DataLoader) -> DataLoader:
        collate: Any = loader.collate_fn
        loader.collate_fn = lambda rows: (setattr(self, "now", self.now + 2), collate(rows))[1]
        return loader

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.now += 1 + batch_idx

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            with measuring(trainer, pl_module):
                self.now += 1e6

    def on_validation_batch_start(self, *args: Any) -> None:
        self.now += 1e6


@pytest.mark.parametrize(("accumulate", "times", "waited"), [
    (1, ([3, 4], [5, 6]), 2), (2, ([7, 11], [15, 19]), 4)], ids=["1", "2"])  # fmt: skip
def test_step_times_waiting_and_speed_of_each_interval(
    monkeypatch, tmp_path: Path, accumulate: int, times: tuple[list[int], list[int]], waited: int
) -> None:
    """Of two steps; several micro-batches are one step, and what is no training is left out."""
    monkeypatch.setattr("anlit.training.callbacks.throughput.peak_flops", lambda *_: 1e9)
    clock, logger = Passing(monkeypatch), MetricsCSV(str(tmp_path))
    quiet_trainer(
        max_epochs=1, logger=logger, num_sanity_val_steps=0, log_every_n_steps=2, limit_val_batches=1,
        accumulate_grad_batches=accumulate, callbacks=[Throughput(), clock], val_check_interval=2 * accumulate,
    ).fit(tiny(GPT), clock.slowly(batches(16 * accumulate, 16)), batches(4, 16))  # fmt: skip
    rows = [row for row in read_rows(logger.path) if row["train/seconds"]]
    assert [row["step"] for row in rows] == ["1", "3"]
    for row, (first, second) in zip(rows, times, strict=True):
        expected = {
            f"step_seconds_p{share}": first + (second - first) * share / 100
            for share in (50, 90, 99)
        }
        speed = 2 * accumulate * 4 * 16 / (first + second)
        expected |= {"data_wait_share": 2 * waited / (first + second), "tokens_per_second": speed}
        expected["mfu"] = FLOPS * speed / 1e9
        assert {name: float(row[f"train/{name}"]) for name in expected} == pytest.approx(expected)
    assert float(rows[1]["train/seconds"]) == pytest.approx(sum(map(sum, times)))
    assert float(rows[1]["train/tokens"]) == 4 * accumulate * 4 * 16


def test_tokens_are_counted_beyond_the_integers_of_float32(tmp_path: Path) -> None:
    throughput = Throughput()
    logger = MetricsCSV(str(tmp_path))
    begun = 2**24 * 32_768 + 1
    throughput.tokens = begun
    quiet_trainer(
        max_steps=2,
        logger=logger,
        log_every_n_steps=1,
        val_check_interval=2,
        callbacks=[throughput],
    ).fit(tiny(GPT), batches(8, 16), batches(4, 16))
    rows = read_rows(logger.path)
    trained = [int(float(row["train/tokens"])) for row in rows if row["train/tokens"]]
    validated = [int(float(row["val/tokens"])) for row in rows if row["val/tokens"]]
    assert trained == [begun + 64, begun + 128]
    assert validated == [begun + 128]


@pytest.mark.gpu
def test_step_times_of_a_device_are_its_own() -> None:
    """The host queues products of matrices in no time; the device needs as long for each three steps' ten."""
    times, matrix = StepTimes(torch.device("cuda")), torch.randn(8192, 8192, device="cuda")
    product = matrix @ matrix
    torch.cuda.synchronize()
    for n_products in (0, 10, 10, 10):
        for _ in range(n_products):
            torch.mm(matrix, matrix, out=product)
        times.mark()
    seconds = times.take()
    assert len(seconds) == 3
    assert min(seconds) > 10 * 2 * 8192**3 / 2e15, "faster than any device"
    assert times.take() == []


@pytest.mark.parametrize(("name", "precision", "tera"), [
    ("NVIDIA H200", "bf16-mixed", 989), ("NVIDIA H200", "32-true", 67), ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989),
    ("NVIDIA A100-SXM4-80GB", "bf16-true", 312), ("NVIDIA A100-SXM4-80GB", "64-true", 19.5),
    ("NVIDIA H100 PCIe", "bf16-mixed", 756),
])  # fmt: skip
def test_peaks_are_dense_and_of_the_precision_and_a_cpu_has_none(
    monkeypatch, name: str, precision: str, tera: float
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0), precision) == pytest.approx(tera * 1e12, rel=0.01)
    assert peak_flops(torch.device("cpu"), precision) is None
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert name != "NVIDIA H200" or peak_flops(torch.device("cuda", 0), "32-true") == 494.5e12
