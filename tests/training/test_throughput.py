"""Throughput counts tokens and seconds of training, without validation.

tests/integration/test_resume.py has a resumed count.
"""

import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from anlit import GPT
from anlit.io.metrics_csv import read_rows
from anlit.nn.models.flops import flops_per_token
from anlit.training.callbacks import Throughput
from anlit.training.callbacks.throughput import (
    MOST_MARKS,
    StepTimes,
    measuring,
    peak_flops,
)
from anlit.training.loggers import MetricsCSV, MetricsOnResume
from tests.data.modules import quiet_trainer
from tests.nn.models.tiny import batches, tiny

FLOPS = flops_per_token(tiny(GPT).model, 16)


class SimulatedClock(L.Callback):
    """The only clock: a fetch takes 2 seconds, batch i takes 1 + i seconds.

    Validation and measuring take very long, and must not count.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.seconds)

    def slow_down(self, loader: DataLoader) -> DataLoader:
        """Let each fetch of the loader take 2 seconds."""
        collate: Any = loader.collate_fn

        def collate_slowly(rows: list[Any]) -> Any:
            self.seconds += 2
            return collate(rows)

        loader.collate_fn = collate_slowly
        return loader

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seconds += 1 + batch_idx

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            with measuring(trainer, pl_module):
                self.seconds += 1e6

    def on_validation_batch_start(self, *args: Any) -> None:
        self.seconds += 1e6


@pytest.mark.parametrize(
    ("accumulate", "step_seconds", "waited_seconds"),
    [
        pytest.param(1, [(3, 4), (5, 6)], 2, id="1"),
        pytest.param(2, [(7, 11), (15, 19)], 4, id="2"),
    ],
)
def test_step_times_waiting_and_speed_of_each_interval(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    accumulate: int,
    step_seconds: list[tuple[int, int]],
    waited_seconds: int,
) -> None:
    """An interval has two steps, and a step has `accumulate` micro-batches."""
    monkeypatch.setattr("anlit.training.callbacks.throughput.peak_flops", lambda *_: 1e9)
    clock = SimulatedClock(monkeypatch)
    logger = MetricsCSV(str(tmp_path))
    trainer = quiet_trainer(
        max_epochs=1,
        logger=logger,
        num_sanity_val_steps=0,
        log_every_n_steps=2,
        limit_val_batches=1,
        accumulate_grad_batches=accumulate,
        callbacks=[Throughput(), clock],
        val_check_interval=2 * accumulate,
    )

    loader = clock.slow_down(batches(16 * accumulate, 16))

    trainer.fit(tiny(GPT), loader, batches(4, 16))

    rows = [row for row in read_rows(logger.path) if row["train/seconds"]]
    first_row, last_row = rows
    assert first_row["step"] == "1"
    assert last_row["step"] == "3"
    for row, (first, second) in zip(rows, step_seconds, strict=True):
        seconds = first + second
        speed = 2 * accumulate * 4 * 16 / seconds
        expected = {
            "train/step_seconds_p50": first + (second - first) * 0.5,
            "train/step_seconds_p90": first + (second - first) * 0.9,
            "train/step_seconds_p99": first + (second - first) * 0.99,
            "train/data_wait_share": 2 * waited_seconds / seconds,
            "train/tokens_per_second": speed,
            "train/mfu": FLOPS * speed / 1e9,
        }
        logged = {name: float(row[name]) for name in expected}
        assert logged == pytest.approx(expected)
    total_seconds = sum(map(sum, step_seconds))
    assert float(last_row["train/seconds"]) == pytest.approx(total_seconds)
    assert float(last_row["train/tokens"]) == 4 * accumulate * 4 * 16


def test_tokens_are_counted_beyond_the_integers_of_float32(tmp_path: Path) -> None:
    throughput = Throughput()
    throughput.tokens = earlier_tokens = 2**24 * 32_768 + 1
    logger = MetricsCSV(str(tmp_path))
    trainer = quiet_trainer(
        max_steps=2,
        logger=logger,
        log_every_n_steps=1,
        val_check_interval=2,
        callbacks=[throughput],
    )

    trainer.fit(tiny(GPT), batches(8, 16), batches(4, 16))

    rows = list(read_rows(logger.path))
    after_a_step = earlier_tokens + 64
    after_two_steps = earlier_tokens + 128
    assert numbers_in(rows, "train/tokens") == [after_a_step, after_two_steps]
    assert numbers_in(rows, "val/tokens") == [after_two_steps]


def numbers_in(rows: list[dict[str, str]], column: str) -> list[int]:
    values = [row[column] for row in rows if row[column]]
    return [int(float(value)) for value in values]


@pytest.mark.gpu
def test_step_times_are_by_the_clock_of_the_device() -> None:
    """The host queues products of matrices in no time; the device needs as long for each step."""
    times = StepTimes(torch.device("cuda"))
    matrix = torch.randn(8192, 8192, device="cuda")
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


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H200", "bf16-mixed", 989),
        ("NVIDIA H200", "32-true", 67),
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989),
        ("NVIDIA A100-SXM4-80GB", "bf16-true", 312),
        ("NVIDIA A100-SXM4-80GB", "64-true", 19.5),
        ("NVIDIA H100 PCIe", "bf16-mixed", 756),
        ("NVIDIA H100 NVL", "bf16-mixed", 835),
        ("NVIDIA H200 NVL", "bf16-mixed", 835),
        ("NVIDIA GH200 480GB", "bf16-mixed", 989),
        ("NVIDIA L40S", "bf16-mixed", 362),
    ],
)
def test_peaks_are_dense_and_depend_on_the_precision(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, tera: float
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    assert peak_flops(torch.device("cuda", 0), precision) == pytest.approx(tera * 1e12, rel=0.01)


def test_tensor_cores_have_another_peak_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")

    assert peak_flops(torch.device("cuda", 0), "32-true") == 494.5e12


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "bf16-mixed"),
        ("NVIDIA GeForce RTX 4090", "bf16-mixed"),
        ("NVIDIA RTX A4000", "bf16-mixed"),
        ("NVIDIA L40S", "64-true"),
    ],
)
def test_a_peak_that_is_not_known_is_not_guessed(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str
) -> None:
    """A peak that is too low would flatter the run."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    assert peak_flops(torch.device("cuda", 0), precision) is None


def test_a_cpu_has_no_peak() -> None:
    assert peak_flops(torch.device("cpu"), "bf16-mixed") is None


def test_a_row_that_two_checkpoints_keep_for_a_full_disk_is_written_once(
    tmp_path: Path,
) -> None:
    """The run continues from the last checkpoint, and then from the best one of the same time."""
    rows = [{"step": 3, "train/loss": 2.5}, {"step": 3, "val/loss": 2.25}]
    trainer = SimpleNamespace(global_step=4, callback_metrics={})

    for _ in ("last", "best"):
        trainer.loggers = [MetricsCSV(str(tmp_path))]
        callback = MetricsOnResume()
        callback.on_load_checkpoint(trainer, None, {"metrics_unwritten": rows})
        callback.on_train_start(trainer, None)

    steps = [row["step"] for row in read_rows(tmp_path / "metrics.csv")]
    assert steps == ["3", "3"]


def test_step_times_of_a_run_that_never_logs_take_bounded_memory() -> None:
    times = StepTimes(torch.device("cpu"))
    for _ in range(MOST_MARKS):
        times.mark()
    tracemalloc.start()

    for _ in range(5 * MOST_MARKS):
        times.mark()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    n_bytes_of_marks = 24 * MOST_MARKS  # a float has 24
    assert grown < 2 * n_bytes_of_marks
    assert len(times.take()) == MOST_MARKS - 1
    assert times.take() == []
