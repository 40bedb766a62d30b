"""Amount and speed of training: tokens, seconds, MFU, step times, time waiting for data, memory."""

import resource
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from typing import Any

import lightning as L
import numpy as np
import torch

from anlit.nn.models.flops import flops_per_token
from anlit.nn.models.runtime import uncompiled
from anlit.training.lightning_internals import (
    FetchTimer,
    callbacks_of_class,
    completes_step,
    is_logged,
)

A100_PEAKS = {"bfloat16": 312e12, "tfloat32": 156e12, "float32": 19.5e12, "float64": 19.5e12}
HOPPER_PEAKS = {"bfloat16": 989e12, "tfloat32": 494.5e12, "float32": 67e12, "float64": 67e12}
PEAKS = {
    "A100": A100_PEAKS,
    "H100": HOPPER_PEAKS,
    "H200": HOPPER_PEAKS,
    "H100 PCIe": {"bfloat16": 756e12, "tfloat32": 378e12, "float32": 51e12, "float64": 51e12},
    "H100 NVL": {"bfloat16": 835e12, "tfloat32": 417.5e12, "float32": 60e12, "float64": 60e12},
    "L40S": {"bfloat16": 362e12, "tfloat32": 183e12, "float32": 91.6e12},
}
"""FLOP/s without sparsity, from NVIDIA's data sheets. H100 and H200 are of the SXM form.

Lightning's table is not used. It has an L4's peak for an L40S, and half of an RTX 4090's."""
GPU_MARKS = {
    "nvl": "H100 NVL",
    "h100 pcie": "H100 PCIe",
    "hbm3": "H100",
    "h200": "H200",
    "a100": "A100",
    "l40s": "L40S",
}
"""A mark in torch's name of a device → its row in `PEAKS`. The first mark that fits decides.

hbm3 marks the SXM form of the H100. The NVL forms of H100 and H200 have the same peaks.
"""
SLICE_MARK = " mig "
"""In the name of a slice of a GPU. Its share of the peak is not known."""


MOST_MARKS = 10_001
"""Ends of steps that are kept for the step times of an interval; a run may never log."""


class StepTimes:
    """Seconds between the ends of successive optimizer steps, of the last 10,000 at most.

    On CUDA the device's clock counts. The host only queues work. Only `take` waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self._marks: deque[Any] = deque(maxlen=MOST_MARKS)
        """CUDA events or seconds at the ends of steps; None for a pause."""

    def pause(self) -> None:
        """Leave out the time until the next `mark`."""
        self._marks.append(None)

    def mark(self) -> None:
        """Record the end of a step, where the next step begins."""
        if self.on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def take(self) -> list[float]:
        """The step times since the last call, in seconds; waits for the last step's end."""
        pairs = []
        for begin, end in pairwise(self._marks):
            if begin is not None and end is not None:
                pairs.append((begin, end))
        while len(self._marks) > 1:
            self._marks.popleft()
        if not self.on_cuda:
            return [end - begin for begin, end in pairs]
        if pairs:
            pairs[-1][1].synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


class Throughput(L.Callback):
    """Logs tokens and seconds over the whole run, across resumes, and the current speed.

    - `train/tokens`: the training tokens of all ranks.
    - `train/seconds`: the wall-clock time of training with data loading and checkpoints, without
      validation.
    - `train/tokens_per_second`, `train/mfu`, `train/step_seconds_p50` …: since the last log.
    - `train/data_wait_share`: the share of this time in which the host waited for a batch. It is an
      upper bound of the cost of data. A device continues with queued work.
    - `train/peak_memory_gb`: the peak in 10⁹ bytes, on CPU the peak of the process.

    The host waits for the device at logging steps only.
    """

    changes_learning = False

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0
        self._batch_started_at = 0.0
        self._data_wait_seconds = 0.0
        self._steps = StepTimes(torch.device("cpu"))
        self._start_interval()

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens = state_dict["tokens"]
        self.seconds = state_dict["seconds"]

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._peak = peak_flops(pl_module.device, trainer.precision)
        self._flops_per_token = cache(partial(flops_per_token, pl_module.model))
        self._start_interval()
        FetchTimer(trainer, self._add_data_wait).install()
        self._batch_started_at = time.perf_counter()
        self._steps = StepTimes(pl_module.device)
        self._steps.mark()

    def leave_out(self, seconds: float) -> None:
        """Do not count the last `seconds` as training."""
        self._batch_started_at += seconds
        self._steps.pause()
        self._steps.mark()

    def _start_interval(self) -> None:
        self._logged_tokens = self.tokens
        self._logged_seconds = self.seconds
        self._flops = 0.0
        self._data_wait_seconds = 0.0

    def _add_data_wait(self, seconds: float) -> None:
        self._data_wait_seconds += seconds

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps.pause()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._batch_started_at = time.perf_counter()
        self._steps.mark()

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            pl_module.log_dict({"val/tokens": self._tokens_to_log, "val/seconds": self.seconds})

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        batch_ended_at = time.perf_counter()
        self.seconds = self.seconds + batch_ended_at - self._batch_started_at
        self._batch_started_at = batch_ended_at
        tokens = batch.tokens.numel() * trainer.world_size
        self.tokens += tokens
        if self._peak:
            self._flops += tokens * self._flops_per_token(batch.tokens.shape[1])
        if completes_step(trainer):
            self._steps.mark()
        if is_logged(trainer, trainer.global_step):
            self._log(trainer, pl_module)

    @property
    def _tokens_to_log(self) -> torch.Tensor:
        """The tokens in float64; Lightning would turn a number into float32."""
        return torch.tensor(self.tokens, dtype=torch.float64)

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        tokens = self.tokens - self._logged_tokens
        seconds = self.seconds - self._logged_seconds
        values: dict[str, Any] = {
            "train/tokens": self._tokens_to_log,
            "train/seconds": self.seconds,
            "train/data_wait_share": self._data_wait_seconds / seconds,
        }
        if self._peak:
            values["train/mfu"] = self._flops / seconds / (self._peak * trainer.world_size)
        times = self._steps.take()
        if times:
            for percent in (50, 90, 99):
                values[f"train/step_seconds_p{percent}"] = float(np.percentile(times, percent))
        pl_module.log_dict(values | peak_memory(pl_module.device))
        # On the host, because Lightning reads the progress bar's metrics in every step.
        pl_module.log("train/tokens_per_second", torch.tensor(tokens / seconds), prog_bar=True)
        self._start_interval()


@contextmanager
def measuring(trainer: L.Trainer, model: Any) -> Iterator[dict[str, Any]]:
    """Let forward passes between steps run in eval mode, in the precision of training, untimed.

    They run uncompiled, because their batches have other shapes than those of training.

    Yields a dictionary; its content is logged at the step of the last batch. Each module's mode is
    restored. `Throughput` comes before the callback that measures, or a step would end after it.
    """
    started_at = time.perf_counter()
    modes = {module: module.training for module in model.modules()}
    values: dict[str, Any] = {}
    model.eval()
    try:
        with (
            torch.no_grad(),
            trainer.precision_plugin.forward_context(),
            uncompiled(model.model),
        ):
            yield values
    finally:
        for module, mode in modes.items():
            module.training = mode
    for logger in trainer.loggers:
        # Lightning logs the loss of this batch at the same step.
        logger.log_metrics(values, step=trainer.global_step - 1)
    for throughput in callbacks_of_class(trainer, Throughput):
        throughput.leave_out(time.perf_counter() - started_at)


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory of the process so far, in 10⁹ bytes, by the names in the log."""
    if device.type == "cuda":
        return {
            "train/peak_memory_gb": torch.cuda.max_memory_allocated(device) / 1e9,
            "train/peak_memory_reserved_gb": torch.cuda.max_memory_reserved(device) / 1e9,
        }
    unit = 1 if sys.platform == "darwin" else 1024
    n_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"train/peak_memory_gb": n_bytes / 1e9}


def product_type(precision: str | int | None) -> str:
    """The type of matrix products at a Trainer precision such as `bf16-mixed`, a key of `PEAKS`."""
    single = "float32" if torch.get_float32_matmul_precision() == "highest" else "tfloat32"
    return {"bf": "bfloat16", "64": "float64"}.get(str(precision)[:2], single)


def peak_flops(device: torch.device, precision: str | int | None) -> float | None:
    """Dense peak in FLOP/s of `device` at a precision such as `bf16-mixed`; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    if SLICE_MARK in name:
        return None
    for mark, gpu in GPU_MARKS.items():
        if mark in name:
            return PEAKS[gpu].get(product_type(precision))
    return None
