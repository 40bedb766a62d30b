"""What the scaling vectors and the weights' norms do during training."""

from typing import Any

import lightning as L
import torch

from anlit.layers.scaling import ScalingVector
from anlit.layers.sharded import whole
from anlit.models.trainer_steps import is_logged


class NormMonitor(L.Callback):
    """Logs at every logging step the mean of each kind of scaling vector and the largest and smallest row norm.

    `scaling/alpha_A`, `scaling/s_qk` … are means over the entries of all layers (of |s|, whose sign has no meaning
    in nGPT); `norms/row_max` and `norms/row_min` run over every vector that the architecture constrains. Logs
    nothing for GPT+.
    """

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_logged(trainer, trainer.global_step):
            with torch.no_grad():
                decoder: Any = pl_module.model
                pl_module.log_dict(scaling_means(decoder) | row_norm_range(decoder))


def scaling_means(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Mean |s| for each name of scaling vector, over the layers: `scaling/<name>` → 0-d tensor."""
    kinds: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, ScalingVector):
            kinds.setdefault(name.rsplit(".", 1)[-1], []).append(whole(module().abs().mean()))
    return {f"scaling/{kind}": torch.stack(means).mean() for kind, means in kinds.items()}


def row_norm_range(model: Any) -> dict[str, torch.Tensor]:
    """The largest and smallest norm among the constrained vectors, as 0-d tensors; empty for GPT+."""
    norms = list(model.row_norms())
    if not norms:
        return {}
    return {
        "norms/row_max": torch.stack([whole(rows.max()) for rows in norms]).max(),
        "norms/row_min": torch.stack([whole(rows.min()) for rows in norms]).min(),
    }
