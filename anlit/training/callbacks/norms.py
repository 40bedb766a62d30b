"""Logs scaling vectors and norms of weights during training."""

from collections import defaultdict
from typing import Any

import lightning as L
import torch
from torch import Tensor

from anlit.nn.layers.precision import wide_dtype
from anlit.nn.layers.scaling import ScalingVector
from anlit.nn.layers.sharded import full_tensor
from anlit.training.lightning_internals import is_logged


class NormMonitor(L.Callback):
    """Logs means of scaling vectors and extremes of row norms at every logging step.

    `scaling/alpha_A`, `scaling/s_qk` … are means of |s| over the entries of all layers. The sign
    means nothing in nGPT. `norms/row_max` and `norms/row_min` are the largest and smallest norm of
    all constrained vectors. GPT+ constrains none.
    """

    changes_learning = False

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if is_logged(trainer, trainer.global_step):
            pl_module.log_dict(_scaling_means(pl_module))
            row_norms = pl_module.model.row_norms()
            if row_norms:
                norms = torch.cat([full_tensor(norms) for norms in row_norms])
                pl_module.log_dict({"norms/row_max": norms.max(), "norms/row_min": norms.min()})


def _scaling_means(model: torch.nn.Module) -> dict[str, Tensor]:
    """The mean of |s| by kind of scaling vector: `scaling/alpha_A` …"""
    means_by_kind: dict[str, list[Tensor]] = defaultdict(list)
    for name, module in model.named_modules():
        if isinstance(module, ScalingVector):
            sizes = full_tensor(module()).abs()
            mean = sizes.mean(dtype=wide_dtype(sizes))
            means_by_kind[f"scaling/{name.rpartition('.')[2]}"].append(mean)
    return {kind: torch.stack(means).mean() for kind, means in means_by_kind.items()}
