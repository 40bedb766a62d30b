"""The loss of an optimizer step: the mean over counted tokens of all micro-batches and ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn

from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from anlit.nn.layers.sharded import local_tensor


class StepLoss:
    """Sums the losses of a step's micro-batches, and scales the gradients before clipping.

    Lightning divides each micro-batch's objective by `accumulate_grad_batches`, N. The strategy
    averages gradients over R ranks. If all batches count equally many tokens, the result is the
    mean over tokens. The epoch's end may cut a step short after n < N micro-batches. Then its
    gradients are multiplied by N/n.

    The numbers of counted tokens may differ (`counts_vary`). Then the backward pass takes the sum
    over tokens divided by a constant K. This `unit` is the context length, which keeps gradients
    near their usual size. Gradients are then multiplied by K·N·R / C. C counts the tokens in all
    micro-batches of all ranks. This costs one all-reduce of two numbers a step. The host does not
    wait for the device.
    """

    def __init__(self, counts_vary: bool = False, unit: int = 1) -> None:
        self.counts_vary = counts_vary
        self.unit = unit
        self.factor: Tensor | float = 1.0
        """The factor of the finished step's gradients; 0-d or a number."""
        self._n_targets: Tensor | None = None
        """Counted tokens in all finished steps; None if the counts do not vary."""
        self._losses: Tensor | None = None
        """The sum of the losses in the current step."""
        self._n_counted: Tensor | None = None
        """Counted tokens in the current step on this rank."""
        self._n_micro_batches = 0

    def add(self, loss: Tensor, objective: Tensor, targets: Tensor) -> Tensor:
        """Add a micro-batch, and return the objective to differentiate, 0-d.

        Args:
            loss: The mean over counted tokens, without gradient.
            objective: The loss with the z-loss.
            targets: (B, T), −100 for a token that does not count.
        """
        self._n_micro_batches += 1
        if self.counts_vary:
            n_counted = (targets != IGNORE_INDEX).sum().to(loss)
            loss = loss * n_counted
            objective = objective * (n_counted / self.unit)
            self._n_counted = n_counted if self._n_counted is None else self._n_counted + n_counted
        self._losses = loss if self._losses is None else self._losses + loss
        return objective

    def finish(self, accumulate_grad_batches: int) -> Tensor:
        """Set `factor` after the last micro-batch, and return the mean loss, 0-d.

        If counts vary, the mean is over all ranks.
        """
        assert self._losses is not None
        losses = self._losses
        n_counted = self._n_counted
        n_micro_batches = self._n_micro_batches
        self._losses = None
        self._n_counted = None
        self._n_micro_batches = 0
        if n_counted is None:
            self.factor = accumulate_grad_batches / n_micro_batches
            return losses / n_micro_batches
        totals = torch.stack([losses, n_counted])
        n_ranks = 1
        if distributed.is_available() and distributed.is_initialized():
            n_ranks = distributed.get_world_size()
            distributed.all_reduce(totals)
        n_targets = totals[1].double()
        self._n_targets = n_targets if self._n_targets is None else self._n_targets + n_targets
        n_counted = totals[1].clamp_min(1)  # no target at all: a loss of 0, not NaN
        self.factor = self.unit * accumulate_grad_batches * n_ranks / n_counted
        return totals[0] / n_counted

    def has_no_target(self) -> bool:
        """Whether steps were finished and no token counted; waits for the device."""
        return self._n_targets is not None and not self._n_targets

    @torch.no_grad()
    def scale_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Multiply all gradients by `factor`."""
        if isinstance(self.factor, float) and self.factor == 1:
            return
        gradients: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad is not None:
                gradients.append(local_tensor(parameter.grad))
        torch._foreach_mul_(gradients, self.factor)
