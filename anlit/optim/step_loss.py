"""The loss of an optimizer step as one mean over all tokens that its micro-batches on all ranks count."""

from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from anlit.layers.cross_entropy import IGNORED


class StepLoss:
    """Sums over the micro-batches of an optimizer step, and what its gradients are multiplied with before clipping.

    Lightning divides each micro-batch's objective by `accumulate_grad_batches`, N, and the strategy averages gradients
    over R ranks. That is the mean over tokens where all batches count as many; nothing is to be done then, but at the
    end of an epoch that comes after n < N micro-batches, where gradients are multiplied by N/n.

    Where numbers may differ, an objective goes into the backward pass as its sum over tokens divided by a constant K.
    Gradients are multiplied by K·N·R / C, C the tokens that all micro-batches of all ranks count: one all-reduce of two
    numbers a step, and no waiting of the host for a device.

    Args:
        counts_vary: Whether batches may count different numbers of tokens.
        unit: K. Any constant does; the context length keeps gradients at the size that they have otherwise.
    """

    def __init__(self, counts_vary: bool = False, unit: int = 1) -> None:
        self.counts_vary, self.unit = counts_vary, unit
        self.factor: Tensor | float = 1.0
        """For the gradients of the step whose last micro-batch was added; 0-d or a number."""
        self._losses: Tensor | None = None
        self._counted: Tensor | None = None
        self._micro_batches = 0

    def add(self, loss: Tensor, objective: Tensor, targets: Tensor) -> Tensor:
        """Count a micro-batch in; returns what to differentiate.

        Args:
            loss: Its mean over counted tokens, 0-d, without gradient.
            objective: The same mean with whatever else is to be minimised, 0-d.
            targets: (B, T), −100 where a token does not count.
        """
        self._micro_batches += 1
        if self.counts_vary:
            counted = (targets != IGNORED).sum().to(loss)
            loss, objective = loss * counted, objective * (counted / self.unit)
            self._counted = counted if self._counted is None else self._counted + counted
        self._losses = loss if self._losses is None else self._losses + loss
        return objective

    def finish(self, accumulate_grad_batches: int) -> Tensor:
        """After the last micro-batch: sets `factor`; returns the mean loss, of all ranks where counts vary, else of
        this one."""
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
        of_all = totals[1].clamp_min(1)  # no target at all: a loss of 0, not NaN
        self.factor = self.unit * accumulate_grad_batches * ranks / of_all
        return totals[0] / of_all

    @torch.no_grad()
    def scale_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Multiply all gradients by `factor`."""
        if isinstance(self.factor, float) and self.factor == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        torch._foreach_mul_(local, self.factor)
