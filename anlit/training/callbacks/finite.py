"""Stops a run at NaN or infinite numbers, before they reach the weights or a checkpoint."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from anlit.checkpoints.newest import checkpoints_to_continue
from anlit.errors import DivergenceError, UserError
from anlit.nn.layers.sharded import local_tensor
from anlit.training.lightning_internals import is_logged


class StopOnNonFinite(L.Callback):
    """Raises UserError when a loss or a gradient is NaN or infinite.

    The message names the step and the last good checkpoint. On CPU every step is checked before the
    optimizer's step. On an accelerator every check would wait for the device. So flags stay there.
    They are read at logging steps and before a checkpoint is written.
    """

    changes_learning = False

    def __init__(self) -> None:
        self._is_finite: dict[str, Tensor] = {}
        """Quantity → whether all its numbers were finite."""

    def on_gradient_norm(
        self, trainer: L.Trainer, pl_module: L.LightningModule, norm: Tensor
    ) -> None:
        """Check the norm. All ranks have the same norm, so all of them stop."""
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

    def _note(self, quantity: str, number: Tensor) -> None:
        is_finite = torch.isfinite(number.detach())
        self._is_finite[quantity] = self._is_finite.get(quantity, True) & is_finite

    def _check(self, trainer: L.Trainer, step: int) -> None:
        for quantity, is_finite in self._is_finite.items():
            if not is_finite:
                raise divergence_error(
                    trainer, f"the {quantity} became NaN or infinite at step {step}"
                )


class FiniteCheckpoints(L.Callback):
    """Refuses NaN or infinite weights and optimizer states, at the start and in checkpoints.

    The previous file stays. Only these two checks wait for the device.
    """

    changes_learning = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if _count_non_finite(trainer, pl_module):
            raise UserError(
                "the weights or the optimizer state that training starts from are NaN or infinite: "
                "give another checkpoint in ckpt_path or initial_weights"
            )

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if not trainer.optimizers:
            return
        n_tensors = _count_non_finite(trainer, pl_module)
        if n_tensors:
            raise divergence_error(
                trainer,
                f"weights or optimizer state became NaN or infinite by step {trainer.global_step} "
                f"({n_tensors} tensors)",
            )


@torch.no_grad()
def _count_non_finite(trainer: L.Trainer, model: torch.nn.Module) -> int:
    """Count weights and optimizer states with a NaN or infinite entry; the most on a rank.

    All ranks call this.
    """
    tensors = list(model.state_dict().values())
    for state in trainer.optimizers[0].state.values():
        tensors += state.values()
    flags = []
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            flags.append(~torch.isfinite(local_tensor(tensor)).all())
    device = flags[0].device  # unless fused, AdamW counts steps on the host
    n_tensors = torch.stack([flag.to(device) for flag in flags]).sum()
    return int(trainer.strategy.reduce(n_tensors.float(), reduce_op="max"))


def divergence_error(trainer: L.Trainer, event: str) -> DivergenceError:
    """The error that ends a run after `event`. It names the newest checkpoint.

    The checkpoint is good, because `FiniteCheckpoints` refuses to write another.
    """
    folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    checkpoints: list[Path] = []
    for folder in dict.fromkeys(filter(None, folders)):  # callbacks share the run's folder
        checkpoints += checkpoints_to_continue(Path(folder))
    newest = checkpoints[0] if checkpoints else "none yet"
    return DivergenceError(
        f"{event}: lower the learning rate (model.optimizer) or inspect the data; the last good "
        f"checkpoint is {newest}"
    )
