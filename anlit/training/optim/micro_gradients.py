"""Squared norms of the gradients of a step's micro-batches, without a change to training.

Only matrices count. nGPT and anGPT store a scaling vector divided by init/scale, by which its
gradient is multiplied. It would outweigh the matrices by a factor that is a choice.

For vectors at their norm's bound only the gradient's part tangential to the sphere counts.
Restoring the norms undoes the radial part.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.utils.hooks import RemovableHandle

from anlit.nn.layers.norms import AT_BOUND
from anlit.nn.layers.precision import wide_dtype
from anlit.nn.layers.sharded import full_tensor, total_norm


class MicroGradients:
    """The gradients of one optimizer step, from its first micro-batch on.

    Args:
        decoder: The model whose gradients accumulate in `.grad`.
    """

    def __init__(self, decoder: Any) -> None:
        weights = dict.fromkeys(weight for _, weight in decoder.matrices())  # a tied matrix once
        self.matrices = [weight for weight in weights if weight.requires_grad]
        self.axes = {weight: axis for weight, axis, _ in decoder.constraints()}
        """A constrained matrix → the axis along which its vectors lie."""
        self.n_micro_batches = 0
        self.squares: Tensor | float = 0.0
        """The sum of the micro-batches' squared norms, as the backward pass gives the gradients."""

    def end_micro_batch(self) -> None:
        """Call this after each backward pass."""
        self.n_micro_batches += 1

    def step_square(self) -> Tensor:
        """The squared norm of the accumulated gradients, 0-d float64."""
        gradients = self._accumulated()
        return self.square(list(gradients), list(gradients.values()))

    def square(self, weights: list[nn.Parameter], gradients: list[Tensor]) -> Tensor:
        """The squared norm of gradients by these weights, 0-d float64."""
        total = full_tensor(total_norm(gradients)).double().square()
        for weight, gradient in zip(weights, gradients, strict=True):
            if weight in self.axes:
                total = total - radial_square(gradient, weight.detach(), self.axes[weight])
        return total

    def _accumulated(self) -> dict[nn.Parameter, Tensor]:
        gradients = {}
        for weight in self.matrices:
            if weight.grad is not None:
                gradients[weight] = weight.grad.detach()
        return gradients


class LocalMicroGradients(MicroGradients):
    """On one device or with DDP: each micro-batch and rank has a gradient before reduction.

    A hook on a weight gets the whole gradient of a backward pass. This holds for tied weights too.
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__(decoder)
        self._hooks: list[RemovableHandle] = []
        for weight in self.matrices:
            self._hooks.append(weight.register_hook(partial(self._add, weight)))

    def _add(self, weight: nn.Parameter, gradient: Tensor) -> None:
        self.squares = self.square([weight], [gradient]) + self.squares

    def step_square(self) -> Tensor:
        for hook in self._hooks:
            hook.remove()
        return super().step_square()


class ShardedMicroGradients(MicroGradients):
    """With FSDP2: a micro-batch's gradient is the mean over ranks, in shards.

    A copy of the accumulated shards tells what a micro-batch has added. All ranks call each method.
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__(decoder)
        self._earlier: dict[nn.Parameter, Tensor] = {}

    def end_micro_batch(self) -> None:
        super().end_micro_batch()
        accumulated = self._accumulated()
        added = []
        for weight, gradient in accumulated.items():
            earlier = self._earlier.get(weight)
            added.append(gradient if earlier is None else gradient - earlier)
        self.squares = self.square(list(accumulated), added) + self.squares
        self._earlier = {weight: gradient.clone() for weight, gradient in accumulated.items()}


@torch.no_grad()
def radial_square(gradient: Tensor, weight: Tensor, axis: int) -> Tensor:
    """Σ (g·w)² / ‖w‖² over the vectors w along `axis` that are at their bound, 0-d float64.

    Gradient and weight are (out, in), both sharded or both whole.
    """
    dtype = wide_dtype(weight)
    norms = full_tensor(vector_norm(weight, dim=axis, dtype=dtype))
    products = full_tensor((gradient.to(dtype) * weight.to(dtype)).sum(axis))
    lengths = torch.where(norms >= AT_BOUND, products / norms, 0.0)
    return lengths.double().square().sum()
