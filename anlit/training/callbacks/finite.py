"""Stops a run at NaN or infinite numbers, before they reach the weights or a checkpoint."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from anlit.errors import UserError
from anlit.models.trainer_steps import is_logged


class StopOnNonFinite(L.Callback):
    """Raises UserError when a loss or a gradient is NaN or infinite; names the step and the last good checkpoint.

    On CPU every step is checked before the optimizer's step. On an accelerator every check would wait for the device,
    so flags are kept on the device and read at logging steps and before a checkpoint is written. With `precision:
    16-mixed` gradients are not checked, because steps that overflow are skipped anyway.
    """

    def __init__(self) -> None:
        self._losses_finite: Tensor | None = None
        self._gradients_finite: Tensor | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        model: Any = pl_module
        if trainer.precision != "16-mixed":
            model.on_gradient_norm = lambda norm: self._on_gradient_norm(trainer, pl_module, norm)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        model: Any = pl_module
        model.on_gradient_norm = None

    def _on_gradient_norm(self, trainer: L.Trainer, pl_module: L.LightningModule, norm: Tensor) -> None:
        """Check the norm. It is the same on all ranks, so all of them stop."""
        self._gradients_finite = _and_finite(self._gradients_finite, norm)
        if pl_module.device.type == "cpu":
            self._check(trainer, trainer.global_step + 1)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if trainer.precision != "16-mixed":  # there the loss is multiplied by a large factor
            self._losses_finite = _and_finite(self._losses_finite, loss)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.precision == "16-mixed":
            self._losses_finite = _and_finite(self._losses_finite, outputs["loss"])
        if pl_module.device.type == "cpu" or is_logged(trainer, trainer.global_step):
            self._check(trainer, trainer.global_step)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._check(trainer, trainer.global_step)

    def _check(self, trainer: L.Trainer, step: int) -> None:
        for what, finite in (("training loss", self._losses_finite), ("gradient", self._gradients_finite)):
            if finite is not None and not bool(finite):
                raise diverged(trainer, f"the {what} became NaN or infinite at step {step}")


class FiniteCheckpoints(L.Callback):
    """Refuses to write a checkpoint whose weights or optimizer state are NaN or infinite.

    The previous file stays. The state is also checked when training starts. It waits for the device only then and when
    a checkpoint is saved, which waits anyway.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if _n_non_finite_of_all_ranks(trainer, pl_module):
            raise UserError(
                "the weights or the optimizer state that training starts from are NaN or infinite: give another "
                "checkpoint in ckpt_path or initial_weights"
            )

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if n_tensors := _n_non_finite_of_all_ranks(trainer, pl_module):
            what = f"weights or optimizer state became NaN or infinite by step {trainer.global_step}"
            raise diverged(trainer, f"{what} ({n_tensors} tensors)")


def _and_finite(so_far: Tensor | None, number: Tensor) -> Tensor:
    finite = torch.isfinite(number.detach())
    return finite if so_far is None else so_far & finite


@torch.no_grad()
def _n_non_finite(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """How many of this rank's weights and optimizer states have a NaN or infinite entry: a 0-d tensor."""
    tensors = list(model.state_dict().values())
    tensors += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    floats = [tensor for tensor in local if tensor.is_floating_point()]
    device = floats[0].device  # unless fused, AdamW counts steps on the host
    return torch.stack([(~torch.isfinite(tensor).all()).to(device) for tensor in floats]).sum()


def _n_non_finite_of_all_ranks(trainer: L.Trainer, pl_module: L.LightningModule) -> int:
    """The largest number of non-finite tensors on any rank; all ranks must call this."""
    if not trainer.optimizers:
        return 0
    return int(trainer.strategy.reduce(_n_non_finite(pl_module, trainer.optimizers[0]).float(), reduce_op="max"))


def diverged(trainer: L.Trainer, what: str) -> UserError:
    """The error that ends a run after `what` happened, with advice and the last good checkpoint."""
    return UserError(
        f"{what}: lower the learning rate (model.optimizer) or inspect the data; "
        f"the last good checkpoint is {last_checkpoint(trainer)}"
    )


def last_checkpoint(trainer: L.Trainer) -> str:
    """The newest checkpoint file that this Trainer's callbacks have written, or 'none yet'.

    Because of `FiniteCheckpoints` it has finite weights.
    """
    folders = {Path(c.dirpath) for c in trainer.checkpoint_callbacks if getattr(c, "dirpath", None)}  # type: ignore[attr-defined]
    files = [file for folder in folders if folder.is_dir() for file in folder.glob("*.ckpt")]
    return str(max(files, key=lambda file: file.stat().st_mtime)) if files else "none yet"
