"""The mean loss of an evaluation, in float64 for any precision of the model."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric


class MeanLoss(Metric):
    """The mean over counted targets of all batches and ranks. NaN stays NaN.

    `compute` returns the mean loss in nats per target (NaN without targets) and the number of
    targets. Only `compute` waits for the device.
    """

    full_state_update = False
    total: Tensor
    n_targets: Tensor

    def __init__(self) -> None:
        super().__init__()
        zero = torch.zeros((), dtype=torch.float64)
        self.add_state("total", default=zero, dist_reduce_fx="sum")
        self.add_state("n_targets", default=zero.clone(), dist_reduce_fx="sum")

    def update(self, loss: Tensor, n_targets: Tensor) -> None:
        """Add a batch: mean loss in nats per counted target, and number of targets, 0-d."""
        self.total += loss.detach().double() * n_targets
        self.n_targets += n_targets

    def compute(self) -> tuple[Tensor, Tensor]:
        return self.total / self.n_targets, self.n_targets

    def _apply(
        self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = ""
    ) -> torch.nn.Module:
        """Move the sums with the module in float64; `precision: bf16-true` casts the module."""
        return super()._apply(lambda state: state.to(fn(state).device), exclude_state)
