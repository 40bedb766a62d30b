"""Logs scaling vectors and norms of weights during training."""

from collections import defaultdict
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from anlit.nn.layers.precision import wide_dtype
from anlit.nn.layers.scaling import ScalingVector
from anlit.nn.layers.sharded import full_tensor
from anlit.training.lightning_internals import is_logged


class NormMonitor(L.Callback):
    """Logs at every logging step the mean of each kind of scaling vector and the largest and smallest row norm.

    `scaling/alpha_A`, `scaling/s_qk` … are means of |s| over the entries of all layers; the sign has no meaning in
    nGPT. `norms/row_max` and `norms/row_min` are over all vectors that the architecture constrains; none for GPT+.
    """

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if is_logged(trainer, trainer.global_step):
            kinds: dict[str, list[Tensor]] = defaultdict(list)
            for name, module in pl_module.named_modules():
                if isinstance(module, ScalingVector):
                    sizes = full_tensor(module()).abs()
                    mean = sizes.mean(dtype=wide_dtype(sizes))
                    kinds[f"scaling/{name.rpartition('.')[2]}"].append(mean)
            pl_module.log_dict({kind: torch.stack(means).mean() for kind, means in kinds.items()})
            if parts := [_of_this_rank(rows) for rows in pl_module.model.row_norms()]:
                norms = torch.cat(parts)
                ends = (
                    torch.stack([norms.max(), -norms.min()])
                    if len(norms)
                    else norms.new_full((2,), -torch.inf)
                )
                largest, smallest = trainer.strategy.reduce(
                    ends, reduce_op="max"
                )  # one meeting, however many weights
                pl_module.log_dict({"norms/row_max": largest, "norms/row_min": -smallest})


def _of_this_rank(rows: Tensor) -> Tensor:
    """This rank's part of a 1-d tensor, or all of it if its entries are partial sums over ranks."""
    if isinstance(rows, DTensor) and not any(
        placement.is_partial() for placement in rows.placements
    ):
        return rows.to_local()
    return full_tensor(rows)
