"""Amount and speed of training: tokens, seconds, MFU, step times, time waiting for data, memory."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.throughput import get_available_flops

from anlit.nn.models.flops import flops_per_token
from anlit.training.lightning_internals import completes_step, is_logged, time_fetches

_HOPPER = {"bfloat16": 989e12, "tfloat32": 494.5e12, "float32": 67e12, "float64": 67e12}
PEAKS = {
    "A100": {"bfloat16": 312e12, "tfloat32": 156e12, "float32": 19.5e12, "float64": 19.5e12},
    "H100": _HOPPER,
    "H200": _HOPPER,
}
"""FLOP/s without sparsity, from NVIDIA's data sheets (SXM). Lightning has twice as much for the H200."""
SXM = {"a100": "A100", "hbm3": "H100", "h200": "H200"}
"""What torch's name of a device has, and its row in the table; an A100 has one peak in every form."""


class StepTimes:
    """Seconds between the ends of successive optimizer steps.

    On CUDA by the device's clock, because the host only queues work; nothing waits for the device until `take`.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self._ends: list[Any] = []  # None: a pause

    def pause(self) -> None:
        """Leave out the time until the next `mark`."""
        self._ends.append(None)

    def mark(self) -> None:
        """Record the end of a step, which is the beginning of the next."""
        self._ends.append(
            torch.cuda.Event(enable_timing=True) if self.on_cuda else time.perf_counter()
        )
        if self.on_cuda:
            self._ends[-1].record()

    def take(self) -> list[float]:
        """The step times since the last call, in seconds; waits for the last step's end."""
        pairs = [
            (begin, end)
            for begin, end in pairwise(self._ends)
            if begin is not None and end is not None
        ]
        self._ends = self._ends[-1:]
        if self.on_cuda and pairs:
            pairs[-1][1].synchronize()
        return [
            begin.elapsed_time(end) / 1e3 if self.on_cuda else end - begin for begin, end in pairs
        ]


class Throughput(L.Callback):
    """Counts tokens and seconds over the whole run, across resumes, and logs them with the present speed.

    `train/tokens` are the training tokens that all ranks have seen, `train/seconds` the wall-clock of training with
    data loading and checkpoints, but without validation. Speed, MFU and step times (`StepTimes`) are those since the
    last logging step, as is `train/data_wait_share`, the share of seconds that the host waited for the next batch: an
    upper bound of what the data costs, since a device continues with queued work. Memory is the peak in 10⁹ bytes, on
    CPU that of the process. The host waits for the device at logging steps only.
    """

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0
        self._mark, self._waits, self._steps = 0.0, list[float](), StepTimes(torch.device("cpu"))
        self._start_interval()

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens, self.seconds = state_dict["tokens"], state_dict["seconds"]

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._peak = peak_flops(pl_module.device, trainer.precision)
        self._flops_per_token = cache(partial(flops_per_token, pl_module.model))
        self._start_interval()
        time_fetches(trainer, self._waits.append)
        self._mark = time.perf_counter()
        self._steps = StepTimes(pl_module.device)
        self._steps.mark()

    def _start_interval(self) -> None:
        self._logged, self._flops = (self.tokens, self.seconds), 0.0
        self._waits.clear()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps.pause()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._mark = time.perf_counter()
        self._steps.mark()

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            pl_module.log_dict({"val/tokens": self._counted, "val/seconds": self.seconds})

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self.seconds, self._mark = self.seconds + now - self._mark, now
        tokens = batch.tokens.numel() * trainer.world_size
        self.tokens += tokens
        if self._peak:
            self._flops += tokens * self._flops_per_token(batch.tokens.shape[1])
        if completes_step(trainer):
            self._steps.mark()
        if is_logged(trainer, trainer.global_step):
            self._log(trainer, pl_module)

    @property
    def _counted(self) -> torch.Tensor:
        """The tokens as Lightning logs them; of a number it would make a float32."""
        return torch.tensor(self.tokens, dtype=torch.float64)

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        tokens, seconds = self.tokens - self._logged[0], self.seconds - self._logged[1]
        values: dict[str, Any] = {"train/tokens": self._counted, "train/seconds": self.seconds}
        values["train/data_wait_share"] = sum(self._waits) / seconds
        if self._peak:
            values["train/mfu"] = self._flops / seconds / (self._peak * trainer.world_size)
        if times := self._steps.take():
            values |= {
                f"train/step_seconds_p{share}": float(np.percentile(times, share))
                for share in (50, 90, 99)
            }
        pl_module.log_dict(values | peak_memory(pl_module.device))
        # On the host, because Lightning reads the progress bar's metrics in every step.
        pl_module.log("train/tokens_per_second", torch.tensor(tokens / seconds), prog_bar=True)
        self._start_interval()


@contextmanager
def measuring(trainer: L.Trainer, model: L.LightningModule) -> Iterator[dict[str, Any]]:
    """For forward passes between steps: in eval mode, in the precision of training, and left out of its time.

    `Throughput` comes before the callback that measures, or a step would end after it. What is put into the dictionary
    is logged at the step of the last batch. Each module's mode is restored.
    """
    begun, modes = time.perf_counter(), {module: module.training for module in model.modules()}
    values: dict[str, Any] = {}
    model.eval()
    try:
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            yield values
    finally:
        for module, mode in modes.items():
            module.training = mode
    for logger in trainer.loggers:
        logger.log_metrics(
            values, step=trainer.global_step - 1
        )  # where Lightning logs the loss of this batch
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Throughput):
            callback._mark += time.perf_counter() - begun  # these seconds are no training
            callback._steps.pause()
            callback._steps.mark()


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory of the process so far, in 10⁹ bytes, by the names in the log."""
    if device.type == "cuda":
        allocated, reserved = (
            torch.cuda.max_memory_allocated(device),
            torch.cuda.max_memory_reserved(device),
        )
        return {
            "train/peak_memory_gb": allocated / 1e9,
            "train/peak_memory_reserved_gb": reserved / 1e9,
        }
    unit = 1 if sys.platform == "darwin" else 1024
    return {"train/peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9}


def product_type(precision: str | int | None) -> str:
    """In what matrix products run at a Trainer precision such as `bf16-mixed`: a column of `PEAKS`."""
    single = "float32" if torch.get_float32_matmul_precision() == "highest" else "tfloat32"
    return {"bf": "bfloat16", "64": "float64"}.get(str(precision)[:2], single)


def peak_flops(device: torch.device, precision: str | int | None) -> float | None:
    """Dense peak in FLOP/s of `device` at a Trainer precision such as `bf16-mixed`; None if it is not known."""
    if device.type != "cuda":
        return None
    kind, name = product_type(precision), torch.cuda.get_device_name(device).lower()
    known = next((PEAKS[chip] for mark, chip in SXM.items() if mark in name), {})
    return known.get(kind) or get_available_flops(device, getattr(torch, kind.removeprefix("t")))
