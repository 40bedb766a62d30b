"""Logs scaling vectors and norms of weights during training."""

import math
from typing import Any

import lightning as L
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from anlit.layers.scaling import ScalingVector
from anlit.layers.sharded import full_tensor
from anlit.lightning_internals import is_logged


class NormMonitor(L.Callback):
    """Logs at every logging step the mean of each kind of scaling vector and the largest and smallest row norm.

    `scaling/alpha_A`, `scaling/s_qk` … are means of |s| over the entries of all layers; the sign has no meaning in
    nGPT. `norms/row_max` and `norms/row_min` are over all vectors that the architecture constrains. Logs nothing for
    GPT+.
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
            kinds.setdefault(name.rsplit(".", 1)[-1], []).append(full_tensor(module()).abs().mean())
    return {f"scaling/{kind}": torch.stack(means).mean() for kind, means in kinds.items()}


def row_norm_range(model: Any) -> dict[str, torch.Tensor]:
    """The largest and smallest norm among the constrained vectors, as 0-d tensors; empty for GPT+.

    Of sharded weights each rank reads its own rows, which may be none. One all-reduce follows.
    """
    norms = list(model.row_norms())
    if not norms:
        return {}
    local = torch.cat([_of_this_rank(rows) for rows in norms])
    ends = torch.stack([local.max(), -local.min()]) if len(local) else local.new_full((2,), -math.inf)
    if any(isinstance(rows, DTensor) for rows in norms):
        distributed.all_reduce(ends, distributed.ReduceOp.MAX)
    return {"norms/row_max": ends[0], "norms/row_min": -ends[1]}


def _of_this_rank(rows: torch.Tensor) -> torch.Tensor:
    """This rank's part of a 1-d tensor, or all of it if its entries are partial sums over ranks."""
    if not isinstance(rows, DTensor):
        return rows
    return rows.full_tensor() if any(placement.is_partial() for placement in rows.placements) else rows.to_local()
