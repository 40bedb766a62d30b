"""Logs scaling vectors and norms of weights during training."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from anlit.layers.scaling import ScalingVector
from anlit.layers.sharded import full_tensor
from anlit.lightning_internals import is_logged


class NormMonitor(L.Callback):
    """Logs at every logging step the mean of each kind of scaling vector and the largest and smallest row norm.

    `scaling/alpha_A`, `scaling/s_qk` … are means of |s| over the entries of all layers; the sign has no meaning in
    nGPT. `norms/row_max` and `norms/row_min` are over all vectors that the architecture constrains. Logs nothing for
    GPT+.
    """

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if is_logged(trainer, trainer.global_step):
            kinds: dict[str, list[Tensor]] = {}
            for name, module in pl_module.named_modules():
                if isinstance(module, ScalingVector):
                    kinds.setdefault(name.rsplit(".", 1)[-1], []).append(full_tensor(module()).abs().mean())
            pl_module.log_dict({f"scaling/{kind}": torch.stack(means).mean() for kind, means in kinds.items()})
            if len(norms := row_norms(pl_module.model)):
                pl_module.log_dict({"norms/row_max": norms.max(), "norms/row_min": norms.min()})


def row_norms(decoder: Any) -> Tensor:
    """The norms of all vectors that the architecture constrains, of the shards of all ranks; none for GPT+."""
    return torch.cat([full_tensor(rows) for rows in decoder.row_norms()] or [torch.empty(0)])
