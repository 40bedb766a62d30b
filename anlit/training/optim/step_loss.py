"""The loss of an optimizer step: the mean over counted tokens of all micro-batches and ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn

from anlit.errors import UserError
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from anlit.nn.layers.sharded import local_tensor


class StepLoss:
    """Sums the losses of a step's micro-batches, and scales the gradients before clipping.

    Lightning divides each micro-batch's objective by `accumulate_grad_batches`, N. The strategy
    averages gradients over R ranks. If all batches count equally many tokens, the result is the
    mean over tokens. The epoch's end may cut a step short after n < N micro-batches. Then its
    gradients are multiplied by N/n.

    The numbers of counted tokens may differ (`counts_vary`). Then the backward pass weighs a
    micro-batch of c counted tokens by c/K. The constant K, `unit`, is the context length, which
    keeps gradients near their usual size. Gradients are then multiplied by K·N·R / C. C counts the
    tokens in all micro-batches of all ranks. This costs one all-reduce of two numbers a step. The
    host does not wait for the device.

    So a micro-batch has the share c/C in the step, and the shares sum to 1. A term that a subclass
    adds to the objective has the same shares.
    """

    def __init__(self, counts_vary: bool = False, unit: int = 1) -> None:
        self.counts_vary = counts_vary
        self.unit = unit
        self.factor: Tensor | float = 1.0
        """The factor of the finished step's gradients; 0-d or a number."""
        self.weight: Tensor | float = 1.0
        """c/K of the current micro-batch; 0-d or a number."""
        self._is_added = False
        """Whether the loss of the current micro-batch is in the sum."""
        self._n_targets: Tensor | None = None
        """Counted tokens in all finished steps; None if the counts do not vary."""
        self._losses: Tensor | None = None
        """The sum of the losses in the current step."""
        self._n_counted: Tensor | None = None
        """Counted tokens in the current step on this rank."""
        self._n_micro_batches = 0

    def begin_micro_batch(self) -> None:
        """Expect the loss of the next micro-batch."""
        self._is_added = False

    def add(self, loss: Tensor, targets: Tensor) -> None:
        """Add a micro-batch's loss.

        Args:
            loss: The mean over counted tokens, without gradient.
            targets: (B, T), −100 for a token that does not count.

        Raises:
            UserError: It is the second loss of a micro-batch.
        """
        if self._is_added:
            raise UserError(
                "a subclass calls super().training_step twice for a batch, which would count it "
                "twice: take self.loss_of(batch)[1] for a second loss"
            )
        self._is_added = True
        self._n_micro_batches += 1
        if self.counts_vary:
            n_counted = (targets != IGNORE_INDEX).sum().to(loss)
            loss = loss * n_counted
            self.weight = n_counted / self.unit
            self._n_counted = n_counted if self._n_counted is None else self._n_counted + n_counted
        self._losses = loss if self._losses is None else self._losses + loss

    def weigh(self, objective: Tensor) -> Tensor:
        """Return the current micro-batch's objective for its backward pass, 0-d.

        The backward pass ends the micro-batch. A loop without Lightning's hooks, such as that of
        `anlit benchmark step`, does not call `begin_micro_batch`.
        """
        self._is_added = False
        return objective * self.weight if self.counts_vary else objective

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
        if gradients:  # none if a subclass skips the step
            torch._foreach_mul_(gradients, self.factor)
