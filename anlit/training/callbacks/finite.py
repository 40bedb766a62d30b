"""Stops a run at NaN or infinite numbers, before they reach the weights or a checkpoint."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from anlit.checkpoints.location import complete_checkpoints
from anlit.errors import UserError
from anlit.training.lightning_internals import is_logged


class StopOnNonFinite(L.Callback):
    """Raises UserError when a loss or a gradient is NaN or infinite; names the step and the last good checkpoint.

    On CPU every step is checked before the optimizer's step. On an accelerator every check would wait for the device,
    so flags are kept on the device and read at logging steps and before a checkpoint is written.
    """

    def __init__(self) -> None:
        self._finite: dict[str, Tensor] = {}  # whether all numbers of a kind were

    def on_gradient_norm(
        self, trainer: L.Trainer, pl_module: L.LightningModule, norm: Tensor
    ) -> None:
        """Check the norm. It is the same on all ranks, so all of them stop."""
        self._note("gradient", norm)
        if pl_module.device.type == "cpu":
            self._check(trainer, trainer.global_step + 1)

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        self._note("training loss", loss)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if pl_module.device.type == "cpu" or is_logged(trainer, trainer.global_step):
            self._check(trainer, trainer.global_step)

    def on_save_checkpoint(self, trainer: L.Trainer, *_: Any) -> None:
        self._check(trainer, trainer.global_step)

    def _note(self, what: str, number: Tensor) -> None:
        self._finite[what] = self._finite.get(what, True) & torch.isfinite(number.detach())

    def _check(self, trainer: L.Trainer, step: int) -> None:
        for what, finite in self._finite.items():
            if not finite:
                raise divergence_error(trainer, f"the {what} became NaN or infinite at step {step}")


class FiniteCheckpoints(L.Callback):
    """Refuses to start from, and to write, weights or an optimizer state that are NaN or infinite.

    The previous file stays. It waits for the device only where training starts and a checkpoint is saved.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if _n_non_finite(trainer, pl_module):
            what = (
                "the weights or the optimizer state that training starts from are NaN or infinite"
            )
            raise UserError(f"{what}: give another checkpoint in ckpt_path or initial_weights")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.optimizers and (n_tensors := _n_non_finite(trainer, pl_module)):
            what = (
                f"weights or optimizer state became NaN or infinite by step {trainer.global_step}"
            )
            raise divergence_error(trainer, f"{what} ({n_tensors} tensors)")


@torch.no_grad()
def _n_non_finite(trainer: L.Trainer, model: torch.nn.Module) -> int:
    """How many weights and optimizer states have a NaN or infinite entry, at most on a rank; all ranks call this."""
    states = (value for state in trainer.optimizers[0].state.values() for value in state.values())
    local = [
        x.to_local() if isinstance(x, DTensor) else x
        for x in (*model.state_dict().values(), *states)
    ]
    floats = [x for x in local if isinstance(x, Tensor) and x.is_floating_point()]
    device = floats[0].device  # unless fused, AdamW counts steps on the host
    n_tensors = torch.stack([(~torch.isfinite(x).all()).to(device) for x in floats]).sum()
    return int(trainer.strategy.reduce(n_tensors.float(), reduce_op="max"))


def divergence_error(trainer: L.Trainer, what: str) -> UserError:
    """The error that ends a run after `what` happened, with the newest checkpoint: `FiniteCheckpoints` kept it good."""
    folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    checkpoints = [
        checkpoint
        for folder in filter(None, folders)
        for checkpoint in complete_checkpoints(Path(folder))
    ]
    last = checkpoints[0] if checkpoints else "none yet"
    advice = "lower the learning rate (model.optimizer) or inspect the data"
    return UserError(f"{what}: {advice}; the last good checkpoint is {last}")
