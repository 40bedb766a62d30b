"""A Trainer's run of each model: `python -m tests.accelerator.fit MODEL…` prints a JSON object, from the model and the
number of each optimizer step to what waited for the device in it.
"""

import contextlib
import copy
import json
import sys
import tempfile
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torchmetrics.metric
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

import anlit
from anlit.data.batch import Batch
from anlit.training import callbacks as ours
from anlit.training.loggers import CSVLogger
from tests.accelerator.device import NAME, on_device, register
from tests.models.tiny import tiny

LAST_STEP, LOGGED_EVERY, MICRO_BATCHES = 8, 5, 2
BATCH, LENGTH = 4, 16


class Waits(TorchDispatchMode):
    """Notes what waits: a number that is read, a copy between devices that was not told not to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.seen: dict[int, list[str]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0].device.type == NAME:
                self._note("a number is read")
            return True if args[0].dtype == torch.bool else 1.0
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            self._note_copy(args[0].device, torch.device(kwargs["device"]), kwargs.get("non_blocking"))
        if func is torch.ops.aten.copy_.default:
            self._note_copy(args[1].device, args[0].device, args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        return func(*args, **kwargs)

    def _note_copy(self, source: torch.device, target: torch.device, does_not_wait: bool | None) -> None:
        if source.type != target.type and not does_not_wait:
            self._note(f"a copy from {source.type} to {target.type}")

    def _note(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack() if "/anlit/" in f.filename or "lightning" in f.filename]
        callers = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-6:]))
        self.seen[self.step].append(f"{what}: {callers}")


class EnoughError(Exception):
    """The last step was seen; what follows would write numbers, which there are none of."""


class Steps(L.Callback):
    """Tells `waits` which optimizer step is under way."""

    def __init__(self, waits: Waits) -> None:
        self.waits = waits

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.waits.step = trainer.global_step + 1
        if self.waits.step == LAST_STEP:
            raise EnoughError


class Batches:
    """The same batch again and again."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Batch]:
        return iter([self.batch] * len(self))

    def __len__(self) -> int:
        return MICRO_BATCHES * LAST_STEP


class OnDevice(SingleDeviceStrategy):
    """Holds a model whose parameters are there already."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device=device, accelerator=_Accelerator())

    def model_to_device(self) -> None:
        self.model._device = self.root_device  # type: ignore[union-attr, assignment]

    def teardown(self) -> None: ...


class _Accelerator(CPUAccelerator):
    def setup_device(self, device: torch.device) -> None:
        """It is no CPU."""


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


def main(architectures: list[str]) -> None:
    warnings.simplefilter("ignore")
    device = register()
    models = {architecture: tiny(getattr(anlit, architecture)) for architecture in architectures}
    make_fake()
    print(json.dumps({architecture: waits_of(model, device) for architecture, model in models.items()}))


def waits_of(model: L.LightningModule, device: torch.device) -> dict[int, list[str]]:
    """What waited in each optimizer step of a run."""
    waits = Waits()
    with tempfile.TemporaryDirectory() as run_dir, FakeTensorMode(allow_non_fake_inputs=True), waits:
        on_device(model.model)
        batch = Batch(*(torch.empty(BATCH, LENGTH, dtype=torch.int64) for _ in range(4)), torch.empty(9).int(), LENGTH)
        callbacks = [
            *(kind() for kind in (ours.StopOnNonFinite, ours.Throughput, ours.NormMonitor, ours.RandomState)),
            ours.BestCheckpoint(run_dir), ours.LastCheckpoint(run_dir), Steps(waits),
        ]  # fmt: skip
        trainer = L.Trainer(
            max_steps=LAST_STEP, strategy=OnDevice(device), devices=1, gradient_clip_val=1.0, callbacks=callbacks,
            accumulate_grad_batches=MICRO_BATCHES, log_every_n_steps=LOGGED_EVERY, logger=CSVLogger(run_dir),
            enable_model_summary=False,
        )  # fmt: skip
        with contextlib.suppress(EnoughError):
            trainer.fit(model, Batches(batch))
            raise AssertionError(f"the run ended before step {LAST_STEP}")
    return waits.seen


if __name__ == "__main__":
    main(sys.argv[1:])
