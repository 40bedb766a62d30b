"""`last.ckpt` to resume from and `best.ckpt` to keep, each file complete or absent."""

import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes local checkpoints beside their place and renames them: a kill in mid-write leaves the old file whole."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(".partial-" + target.name)  # "last" must not be the start of its name
        with partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)


class BestCheckpoint(ModelCheckpoint):
    """Keeps the checkpoint of the lowest validation loss as `checkpoints/best.ckpt`."""

    def __init__(self, run_dir: str) -> None:
        super().__init__(
            dirpath=Path(run_dir) / "checkpoints",
            filename="best",
            monitor="val/loss",
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )


class LastCheckpoint(ModelCheckpoint):
    """Keeps `checkpoints/last.ckpt`, written every n optimizer steps, after validation and at the end.

    The first SIGINT or SIGTERM is answered at the end of the optimizer step under way: the checkpoint is written
    there, so nothing is lost and the run can be continued exactly; a second signal stops at once.

    Args:
        run_dir: The run folder.
        every_n_steps: Optimizer steps between two checkpoints.
    """

    def __init__(self, run_dir: str, every_n_steps: int = 500) -> None:
        super().__init__(
            dirpath=Path(run_dir) / "checkpoints",
            filename="last",
            every_n_train_steps=every_n_steps,
            enable_version_counter=False,
        )
        self._signal: int | None = None
        self._handlers: dict[int, Any] = {}
        self._step_before_batch = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the signals over from Lightning, whose own SIGTERM handler ends the run without a checkpoint."""
        super().on_train_start(trainer, pl_module)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._on_signal)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = number

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step_before_batch = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = trainer.global_step > self._step_before_batch
        if not stepped or _validation_follows(trainer):
            return
        if self._signal is not None:
            self._save(trainer)
            raise KeyboardInterrupt
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save here rather than before a validation that is due, or a resumed run would lack that validation."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save(trainer)
            if self._signal is not None:
                raise KeyboardInterrupt

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._last_global_step_saved != trainer.global_step:
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))


def _validation_follows(trainer: L.Trainer) -> bool:
    loop = trainer.fit_loop
    return trainer.enable_validation and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # type: ignore[arg-type]
