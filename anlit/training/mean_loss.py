"""The mean loss of an evaluation, in float64 for any precision of the model."""

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor


class MeanLoss:
    """The mean over counted targets of all batches and ranks. NaN stays NaN."""

    def __init__(self) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64)
        """The sum of the losses over this rank's targets, and the number of targets."""

    def add(self, loss: Tensor, n_targets: Tensor) -> None:
        """Add a batch: mean loss in nats per counted target, and number of targets, 0-d."""
        n_targets = n_targets.double()
        sums = torch.stack([loss.detach().double() * n_targets, n_targets])
        self._sums = self._sums.to(sums.device) + sums

    def take(self, strategy: Strategy) -> tuple[Tensor, Tensor]:
        """Return the mean and the number of targets over all ranks, and begin anew.

        The mean is in nats per target, and NaN without targets.
        """
        sums = self._sums.to(strategy.root_device)
        self._sums = torch.zeros(2, dtype=torch.float64)
        loss_sum, n_targets = strategy.reduce(sums, reduce_op="sum")
        return loss_sum / n_targets, n_targets
