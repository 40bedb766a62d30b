"""Stop at a loss that is not a number, before it reaches a checkpoint."""

from pathlib import Path
from typing import Any

import lightning as L
import torch

from anlit.errors import UserError
from anlit.training.loggers import is_logged


class StopOnNonFinite(L.Callback):
    """Raises UserError when the training loss is NaN or infinite; names the step and the last good checkpoint.

    On CPU every step is checked, before its weights are saved. On an accelerator, where each look waits for the
    device, a flag is kept there and read at logging steps and before a checkpoint is written.
    """

    def __init__(self) -> None:
        self._all_finite: torch.Tensor | None = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        finite = torch.isfinite(outputs["loss"].detach())
        self._all_finite = finite if self._all_finite is None else self._all_finite & finite
        if pl_module.device.type == "cpu" or is_logged(trainer, trainer.global_step):
            self._check(trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._check(trainer)

    def _check(self, trainer: L.Trainer) -> None:
        if self._all_finite is None or bool(self._all_finite):
            return
        raise diverged(trainer, f"the training loss became NaN or infinite at step {trainer.global_step}")


def diverged(trainer: L.Trainer, what: str) -> UserError:
    """The error that ends a run for which `what` happened; says what to do and what there is to go on from."""
    return UserError(
        f"{what}: lower the learning rate (model.optimizer) or inspect the data; "
        f"the last good checkpoint is {last_checkpoint(trainer)}"
    )


def last_checkpoint(trainer: L.Trainer) -> str:
    """The newest checkpoint file that this Trainer's callbacks have written, or 'none yet'."""
    folders = {Path(c.dirpath) for c in trainer.checkpoint_callbacks if getattr(c, "dirpath", None)}  # type: ignore[attr-defined]
    files = [file for folder in folders if folder.is_dir() for file in folder.glob("*.ckpt")]
    return str(max(files, key=lambda file: file.stat().st_mtime)) if files else "none yet"
