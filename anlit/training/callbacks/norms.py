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
    """Logs means of scaling vectors and extremes of row norms at every logging step.

    `scaling/alpha_A`, `scaling/s_qk` … are means of |s| over the entries of all layers; the sign
    has no meaning in nGPT. `norms/row_max` and `norms/row_min` are the largest and smallest norm
    of all vectors that the architecture constrains; GPT+ constrains none.
    """

    changes_learning = False

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if is_logged(trainer, trainer.global_step):
            pl_module.log_dict(_scaling_means(pl_module))
            row_norms = pl_module.model.row_norms()
            if row_norms:
                pl_module.log_dict(_norm_extremes(row_norms, trainer))


def _scaling_means(model: torch.nn.Module) -> dict[str, Tensor]:
    """The mean of |s| by kind of scaling vector: `scaling/alpha_A` …"""
    means_by_kind: dict[str, list[Tensor]] = defaultdict(list)
    for name, module in model.named_modules():
        if isinstance(module, ScalingVector):
            sizes = full_tensor(module()).abs()
            mean = sizes.mean(dtype=wide_dtype(sizes))
            means_by_kind[f"scaling/{name.rpartition('.')[2]}"].append(mean)
    return {kind: torch.stack(means).mean() for kind, means in means_by_kind.items()}


def _norm_extremes(row_norms: list[Tensor], trainer: L.Trainer) -> dict[str, Tensor]:
    """The largest and smallest norm over all ranks, by one all-reduce."""
    norms = torch.cat([_local_norms(norms) for norms in row_norms])
    extremes = norms.new_full((2,), -torch.inf)  # for a rank without rows
    if len(norms):
        extremes = torch.stack([norms.max(), -norms.min()])
    largest, negative_smallest = trainer.strategy.reduce(extremes, reduce_op="max")
    return {"norms/row_max": largest, "norms/row_min": -negative_smallest}


def _local_norms(norms: Tensor) -> Tensor:
    """This rank's entries of a 1-d tensor; all entries if they are partial sums over ranks."""
    if not isinstance(norms, DTensor):
        return full_tensor(norms)
    has_partial_sums = any(placement.is_partial() for placement in norms.placements)
    return full_tensor(norms) if has_partial_sums else norms.to_local()
