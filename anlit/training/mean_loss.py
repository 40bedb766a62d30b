"""The mean loss of an evaluation, in float64 whatever the precision of the model."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric


class MeanLoss(Metric):
    """The mean over counted targets, over all batches and ranks. NaN stays NaN.

    Nothing waits for the device before `compute`, which returns the mean loss in nats per target, a NaN
    without one, and the number of targets.
    """

    full_state_update = False
    total: Tensor
    n_targets: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "n_targets"):
            zero = torch.zeros((), dtype=torch.float64)
            self.add_state(name, default=zero, dist_reduce_fx="sum")

    def update(self, loss: Tensor, n_targets: Tensor) -> None:
        """Add a batch: its mean loss in nats per counted target, and the number of these, 0-d."""
        self.total += loss.detach().double() * n_targets
        self.n_targets += n_targets

    def compute(self) -> tuple[Tensor, Tensor]:
        return self.total / self.n_targets, self.n_targets

    def _apply(
        self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = ""
    ) -> torch.nn.Module:
        """Move the sums with the module, and never cast them: `precision: bf16-true` casts the module."""
        return super()._apply(lambda state: state.to(fn(state).device), exclude_state)
