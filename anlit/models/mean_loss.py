"""The mean loss of an evaluation, in float64 whatever the precision of the model."""

import torch
from torch import Tensor


class MeanLoss:
    """Sums losses over counted targets on their device; nothing waits for the device.

    It is no module, so `precision: bf16-true` does not cast its sums. NaN stays NaN.
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def update(self, loss: Tensor, n_targets: Tensor) -> None:
        """Add a batch: its mean loss in nats per counted target, and the number of these, 0-d."""
        n_counted = n_targets.double()
        total = loss.detach().double() * n_counted
        sums = torch.stack([total, n_counted])
        self._sums = sums if self._sums is None else self._sums + sums

    def take_sums(self, device: torch.device) -> Tensor:
        """Summed loss and number of targets of this rank, (2,) float64; the next sums begin at 0."""
        if self._sums is None:
            return torch.zeros(2, dtype=torch.float64, device=device)
        sums = self._sums
        self._sums = None
        return sums
