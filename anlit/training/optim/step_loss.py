"""The loss of an optimizer step: the mean over the counted tokens of all micro-batches on all ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from anlit.nn.layers.cross_entropy import IGNORE_INDEX


class StepLoss:
    """Sums the losses over the micro-batches of an optimizer step, and scales the gradients before clipping.

    Lightning divides each micro-batch's objective by `accumulate_grad_batches`, N, and the strategy averages gradients
    over R ranks. If all batches count equally many tokens, the result is the mean over tokens, but for a step that the
    epoch's end cuts short after n < N micro-batches: its gradients are multiplied by N/n.

    If the numbers of counted tokens may differ (`counts_vary`), the backward pass takes the sum over tokens divided by
    a constant K (`unit`; the context length keeps gradients near their usual size). Gradients are then multiplied by
    K·N·R / C, where C is the number of tokens that all micro-batches of all ranks count. This costs one all-reduce of
    two numbers a step, and the host does not wait for the device.
    """

    def __init__(self, counts_vary: bool = False, unit: int = 1) -> None:
        self.counts_vary, self.unit = counts_vary, unit
        self.factor: Tensor | float = 1.0
        """What the gradients of the finished step are multiplied with; 0-d or a number."""
        self._n_targets: Tensor | None = None
        self._losses: Tensor | None = None
        self._counted: Tensor | None = None
        self._micro_batches = 0

    def add(self, loss: Tensor, objective: Tensor, targets: Tensor) -> Tensor:
        """Add a micro-batch: its mean `loss` over counted tokens without gradient, and the same with the z-loss.

        Returns the objective to differentiate, 0-d. `targets`, (B, T), are −100 where a token does not count.
        """
        self._micro_batches += 1
        if self.counts_vary:
            counted = (targets != IGNORE_INDEX).sum().to(loss)
            loss, objective = loss * counted, objective * (counted / self.unit)
            self._counted = counted if self._counted is None else self._counted + counted
        self._losses = loss if self._losses is None else self._losses + loss
        return objective

    def finish(self, accumulate_grad_batches: int) -> Tensor:
        """Set `factor` after the last micro-batch; returns the mean loss, 0-d, over all ranks if counts vary."""
        assert self._losses is not None
        losses, counted, n = self._losses, self._counted, self._micro_batches
        self._losses, self._counted, self._micro_batches = None, None, 0
        if counted is None:
            self.factor = accumulate_grad_batches / n
            return losses / n
        totals, ranks = torch.stack([losses, counted]), 1
        if distributed.is_available() and distributed.is_initialized():
            ranks = distributed.get_world_size()
            distributed.all_reduce(totals)
        of_step = totals[1].double()
        self._n_targets = of_step if self._n_targets is None else self._n_targets + of_step
        n_counted = totals[1].clamp_min(1)  # no target at all: a loss of 0, not NaN
        self.factor = self.unit * accumulate_grad_batches * ranks / n_counted
        return totals[0] / n_counted

    def has_no_target(self) -> bool:
        """Whether steps have been finished and none had a counted token; waits for the device."""
        return self._n_targets is not None and not self._n_targets

    @torch.no_grad()
    def scale_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Multiply all gradients by `factor`."""
        if isinstance(self.factor, float) and self.factor == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        local = [
            gradient.to_local() if isinstance(gradient, DTensor) else gradient
            for gradient in gradients
        ]
        torch._foreach_mul_(local, self.factor)
