"""Runs of a Trainer, and what waited for the device in each of their optimizer steps."""

import contextlib
import copy
import tempfile
import traceback
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torchmetrics.metric
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from anlit.data.batch import Batch
from anlit.training import callbacks as ours
from anlit.training.loggers import MetricsCSV
from tests.accelerator.device import NAME, on_device
from tests.nn.models.tiny import ARCHITECTURES, tiny

LAST_STEP, LOGGED_EVERY, MICRO_BATCHES = 8, 5, 2
BATCH, LENGTH = 4, 16


class Waits(TorchDispatchMode):
    """Notes what waits: a number that is read, a copy between devices that was not told not to wait."""

    step = 0

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, list[str]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0].device.type == NAME:
                self._note("a number is read")
            return True if args[0].dtype == torch.bool else 1.0
        ends = []
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            ends = [
                args[0].device.type,
                torch.device(kwargs["device"]).type,
                kwargs.get("non_blocking"),
            ]
        if func is torch.ops.aten.copy_.default:
            ends = [
                args[1].device.type,
                args[0].device.type,
                (*args, kwargs.get("non_blocking"))[2],
            ]
        if ends and ends[0] != ends[1] and not ends[2]:
            self._note(f"a copy from {ends[0]} to {ends[1]}")
        return func(*args, **kwargs)

    def _note(self, what: str) -> None:
        frames = [
            f
            for f in traceback.extract_stack()
            if "/anlit/" in f.filename or "lightning" in f.filename
        ]
        callers = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-6:]))
        self.seen[self.step].append(f"{what}: {callers}")


def count(waits: Waits, trainer: L.Trainer, *_: Any) -> None:
    """Tell `waits` which step is under way; the last ends the run, as what follows would write numbers."""
    waits.step = trainer.global_step + 1
    if waits.step == LAST_STEP:
        raise StopAsyncIteration


class Batches(list[Batch]):
    """A loader; a plain list is several loaders to Lightning."""


class NoCPU(CPUAccelerator):
    def setup_device(self, device: torch.device) -> None: ...


class OnDevice(SingleDeviceStrategy):
    """Holds a model whose parameters are there already."""

    def model_to_device(self) -> None:
        self.model._device = self.root_device  # type: ignore[union-attr, assignment]

    def teardown(self) -> None: ...


def make_fake() -> None:
    """Two ways to make a tensor that FakeTensorMode does not take over: from numbers, and as a deep copy."""
    tensor, deepcopy = torch.tensor, copy.deepcopy

    def fake(data: Any, *more: Any, device: Any = None, **settings: Any) -> torch.Tensor:
        with unset_fake_temporarily():
            real = tensor(data, *more, **settings)
        empty = torch.empty(real.shape, dtype=real.dtype)
        return empty if device is None else empty.to(device)

    def copied(x: Any, *more: Any) -> Any:
        return x.clone() if isinstance(x, torch.Tensor) else deepcopy(x, *more)

    torch.tensor = fake  # type: ignore[assignment]
    torchmetrics.metric.deepcopy = copied  # type: ignore[attr-defined]


def waits() -> dict[str, dict[int, list[str]]]:
    """By architecture and step."""
    models = {architecture.__name__: tiny(architecture) for architecture in ARCHITECTURES}
    make_fake()
    return {name: waits_of(model) for name, model in models.items()}


def waits_of(model: L.LightningModule) -> dict[int, list[str]]:
    """What waited in each optimizer step of a run."""
    waits = Waits()
    with (
        tempfile.TemporaryDirectory() as run_dir,
        FakeTensorMode(allow_non_fake_inputs=True),
        waits,
    ):
        on_device(model.model)
        batch = Batch(
            *(torch.empty(BATCH, LENGTH, dtype=torch.int64) for _ in range(4)),
            torch.empty(9).int(),
            LENGTH,
        )
        callbacks = [
            *(kind() for kind in (ours.StopOnNonFinite, ours.Throughput, ours.NormMonitor, ours.RandomState)),
            ours.BestCheckpoint(run_dir), ours.LastCheckpoint(run_dir), 
            L.pytorch.callbacks.LambdaCallback(on_train_batch_start=partial(count, waits)),
        ]  # fmt: skip
        trainer = L.Trainer(
            max_steps=LAST_STEP, strategy=OnDevice(torch.device(NAME, 0), NoCPU()), devices=1, gradient_clip_val=1.0,
            accumulate_grad_batches=MICRO_BATCHES, log_every_n_steps=LOGGED_EVERY, logger=MetricsCSV(run_dir),
            callbacks=callbacks, enable_model_summary=False,
        )  # fmt: skip
        with contextlib.suppress(StopAsyncIteration):
            trainer.fit(model, Batches([batch] * MICRO_BATCHES * LAST_STEP))
            raise AssertionError(f"the run ended before step {LAST_STEP}")
    return waits.seen
