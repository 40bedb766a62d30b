"""Runs of a Trainer, and the operations in each optimizer step that waited for the device."""

import contextlib
import copy
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torchmetrics.metric
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from anlit import AnGPT, MuonAdamW
from anlit.data.batch import Batch
from anlit.training import callbacks
from anlit.training.loggers import MetricsCSV
from anlit.training.weight_averages import keep_averages
from tests.accelerator.device import NAME, on_device
from tests.nn.models.tiny import ARCHITECTURES, tiny

LAST_STEP = 8
"""The optimizer step that ends the run."""

LOGGED_EVERY = 5
"""Optimizer steps from each log to the next."""

MICRO_BATCHES = 2
"""Batches of an optimizer step."""

BATCH_SIZE = 4
LENGTH = 16


class Waits(TorchDispatchMode):
    """Records what waits: reading a number, or a blocking copy between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.by_step: dict[int, list[str]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0].device.type == NAME:
                self._record("a number is read")
            return True if args[0].dtype == torch.bool else 1.0
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            target = torch.device(kwargs["device"])
            self._record_copy(args[0].device, target, kwargs.get("non_blocking"))
        if func is torch.ops.aten.copy_.default:
            is_async = args[2] if len(args) > 2 else kwargs.get("non_blocking")
            self._record_copy(args[1].device, args[0].device, is_async)
        return func(*args, **kwargs)

    def _record_copy(
        self, source: torch.device, target: torch.device, is_async: bool | None
    ) -> None:
        if source.type != target.type and not is_async:
            self._record(f"a copy from {source.type} to {target.type}")

    def _record(self, wait: str) -> None:
        callers = []
        for frame in traceback.extract_stack():
            if "/anlit/" in frame.filename or "lightning" in frame.filename:
                callers.append(f"{Path(frame.filename).name}:{frame.lineno}")
        innermost = " < ".join(reversed(callers[-6:]))
        self.by_step[self.step].append(f"{wait}: {innermost}")


def set_step(waits: Waits, trainer: L.Trainer, *_: Any) -> None:
    """Tell `waits` the current step; end the run at the last, before code that writes numbers."""
    waits.step = trainer.global_step + 1
    if waits.step == LAST_STEP:
        raise StopAsyncIteration


class Batches(list[Batch]):
    """A loader; a plain list is several loaders to Lightning."""


class NoCPU(CPUAccelerator):
    def setup_device(self, device: torch.device) -> None: ...


class OnDevice(SingleDeviceStrategy):
    """Holds a model that has its parameters on the device already."""

    def model_to_device(self) -> None:
        self.model._device = self.root_device  # type: ignore[union-attr, assignment]

    def teardown(self) -> None: ...


def make_fake() -> None:
    """Make two kinds of tensors fake that FakeTensorMode leaves real: from numbers, deep copies."""
    make_real = torch.tensor

    def fake_tensor(data: Any, *more: Any, device: Any = None, **settings: Any) -> torch.Tensor:
        with unset_fake_temporarily():
            real = make_real(data, *more, **settings)
        empty = torch.empty(real.shape, dtype=real.dtype)
        return empty if device is None else empty.to(device)

    def fake_deepcopy(x: Any, *more: Any) -> Any:
        return x.clone() if isinstance(x, torch.Tensor) else copy.deepcopy(x, *more)

    torch.tensor = fake_tensor  # type: ignore[assignment]
    torchmetrics.metric.deepcopy = fake_deepcopy  # type: ignore[attr-defined]


def waits() -> dict[str, dict[int, list[str]]]:
    """What waited, by run and step: each architecture, and a run with the fragments' callbacks."""
    models = {architecture.__name__: tiny(architecture) for architecture in ARCHITECTURES}
    with_options = tiny(AnGPT, lr_factors={"embedding": 0.5}, optimizer=MuonAdamW)
    make_fake()
    waits_by_run = {name: waits_of(model) for name, model in models.items()}
    waits_by_run["with options"] = waits_of(with_options, optional_callbacks())
    return waits_by_run


def optional_callbacks() -> list[L.Callback]:
    """What configs/trainer/ offers: an average of weights, the noise scale, a batch ramp."""
    return [
        EMAWeightAveraging(),
        callbacks.GradientNoiseScale(every_n_steps=LOGGED_EVERY),
        callbacks.BatchRamp({0: 1, 4: MICRO_BATCHES}),
    ]


def fake_batch() -> Batch:
    tensors = [torch.empty(BATCH_SIZE, LENGTH, dtype=torch.int64) for _ in range(4)]
    return Batch(*tensors, torch.empty(9).int(), LENGTH)


def trainer_on_device(run_dir: str, waits: Waits, options: list[L.Callback]) -> L.Trainer:
    set_step_of_waits = L.pytorch.callbacks.LambdaCallback(
        on_train_batch_start=partial(set_step, waits)
    )
    return L.Trainer(
        max_steps=LAST_STEP,
        strategy=OnDevice(torch.device(NAME, 0), NoCPU()),
        devices=1,
        gradient_clip_val=1.0,
        accumulate_grad_batches=MICRO_BATCHES,
        log_every_n_steps=LOGGED_EVERY,
        logger=MetricsCSV(run_dir),
        callbacks=[
            callbacks.StopOnNonFinite(),
            callbacks.Throughput(),
            callbacks.NormMonitor(),
            callbacks.RandomState(),
            callbacks.BestCheckpoint(run_dir),
            callbacks.LastCheckpoint(run_dir),
            *options,
            set_step_of_waits,
        ],
        enable_model_summary=False,
    )


def waits_of(model: L.LightningModule, options: Sequence[L.Callback] = ()) -> dict[int, list[str]]:
    """What waited in each optimizer step of a run."""
    waits = Waits()
    with (
        tempfile.TemporaryDirectory() as run_dir,
        FakeTensorMode(allow_non_fake_inputs=True),
        waits,
    ):
        on_device(model.model)
        batches = Batches([fake_batch()] * MICRO_BATCHES * LAST_STEP)
        trainer = trainer_on_device(run_dir, waits, list(options))
        keep_averages(trainer)
        with contextlib.suppress(StopAsyncIteration):
            trainer.fit(model, batches)
            raise AssertionError(f"the run ended before step {LAST_STEP}")
    return waits.by_step
