"""Next-token cross-entropy from hidden states, without ever holding all logits.

At V = 50,304 and 16,384 tokens the logits are 3.3 GB in float32, and the usual way holds several such tensors.
`linear_cross_entropy` takes a chunk of tokens at a time through the projection, the softmax and back to the gradients
of hidden states and projection, because the gradient of a mean cross-entropy needs nothing from later chunks (as in
Liger, arXiv 2410.10989). The backward pass only multiplies these gradients by the upstream gradient.

Letters: N tokens, d width, V vocabulary.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from anlit.nn.layers.linear import computing_dtype

IGNORE_INDEX = -100
"""Targets with this value do not count in the loss."""
CHUNK_NUMBERS, CHUNK_NUMBERS_OTHERWISE = {"cpu": 2**20}, 2**27
"""Logits in a chunk, by type of device, and on others. On CPU they fit into its caches."""
TILE = 256
"""Tokens of which chunks on other devices are multiples."""


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of the logits x·Wᵀ in nats per counted token, a chunk of tokens at a time; 0 without any.

    Returns the loss, which carries no gradient, and the objective, which does: the loss plus z_loss · mean(log Z)².
    Products are computed in autocast's precision where that is on, the rest in float32 at least. The forward pass
    computes the gradients and keeps them, N·d and V·d numbers. They can be used once and not differentiated again.

    Args:
        x, weight: Hidden states, (B, T, d), and W, (V, d).
        targets: (B, T), −100 where a token does not count.
        z_loss: Weight of the squared log-partition (arXiv 2204.02311).
        compiled: Whether to compile the work on a chunk's logits: three passes over them instead of a dozen.
    """
    dtype = computing_dtype(x)
    # Under autocast, autograd would record the conversion of every product.
    with torch.autocast(x.device.type, enabled=False):
        wants_gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        rows, targets = x.flatten(0, -2), targets.flatten()
        return _LinearCrossEntropy.apply(
            rows,
            weight,
            targets,
            z_loss,
            dtype,
            wants_gradients,
            _compiled_chunk() if compiled else _chunk,
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, z_loss: float, dtype: torch.dtype, wants_gradients: bool,
        chunk: Callable[..., tuple[Tensor, Tensor, Tensor | None]],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        n_counted = (targets != IGNORE_INDEX).sum().clamp_min(1)
        narrow = weight.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        total, penalty = x.new_zeros((), dtype=wide), x.new_zeros((), dtype=wide)
        dx: Any = torch.empty_like(x) if wants_gradients else None
        dweight: Any = torch.zeros_like(weight, dtype=wide) if wants_gradients else None
        size = chunk_size(x.device.type, weight.shape[0], weight.shape[1], x.shape[0])
        for first in range(0, x.shape[0], size):
            rows, row_targets = x[first : first + size].to(dtype), targets[first : first + size]
            losses, squares, gradient = chunk(
                rows @ narrow.mT, row_targets, n_counted, z_loss, wants_gradients
            )
            total += losses
            penalty += squares
            if gradient is not None:
                dx[first : first + size] = gradient @ narrow
                _add_product(dweight, gradient.mT, rows)
        if wants_gradients:
            ctx.save_for_backward(dx, dweight.to(weight.dtype))
        loss = total / n_counted
        ctx.mark_non_differentiable(loss)
        return loss, loss + z_loss * penalty / n_counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, upstream: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight = ctx.saved_tensors
        return dx.mul_(upstream), dweight.mul_(upstream), None, None, None, None, None


def _chunk(
    logits: Tensor, targets: Tensor, n_counted: Tensor, z_loss: float, wants_gradients: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sums over counted rows of −log p(target) and of (log Z)², and the gradient of the mean objective by the logits.

    logits (rows, V), targets (rows,).
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    counted = (targets != IGNORE_INDEX)[:, None]
    at_target = targets.clamp_min(0)[:, None]
    probabilities = logits.softmax(-1, dtype=wide)
    # The largest probability is exp(largest logit)/Z and at least 1/V. It gives log Z without another exponential.
    log_z = logits.amax(-1, keepdim=True).to(wide) - probabilities.amax(-1, keepdim=True).log()
    losses = torch.where(counted, log_z - logits.gather(1, at_target), 0).sum()
    squares = torch.where(counted, log_z.square(), 0).sum()
    if not wants_gradients:
        return losses, squares, None
    weights = counted.to(wide) / n_counted
    factors = weights * (1 + 2 * z_loss * log_z) if z_loss else weights
    if torch.compiler.is_compiling():  # a scatter would write all of it to memory in float32 first
        is_target = torch.arange(logits.shape[1], device=logits.device) == at_target
        gradient = probabilities * factors - torch.where(is_target, weights, 0)
    else:
        gradient = probabilities.mul_(factors).scatter_add_(1, at_target, -weights)
    return losses, squares, gradient.to(logits.dtype)


@cache
def _compiled_chunk() -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
    return torch.compile(_chunk, dynamic=False)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, the sum over chunks in the precision of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif (
        total.device.type == "cuda"
    ):  # elsewhere torch has no such product; here it saves a pass over `total`
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def chunk_size(device_type: str, vocab_size: int, width: int, n_tokens: int) -> int:
    """Tokens whose logits are held at a time. At least d, or adding to W's gradient would cost more than the logits.

    On a GPU chunks are of equal size if they can be, and multiples of `TILE`: a rest would be another compilation, and
    leave most of the device idle.
    """
    most = max(width, CHUNK_NUMBERS.get(device_type, CHUNK_NUMBERS_OTHERWISE) // vocab_size)
    if device_type == "cpu":
        return most
    fewest = math.ceil(n_tokens / most)
    equal = (n_tokens // n for n in range(fewest, 2 * fewest) if n_tokens % (n * TILE) == 0)
    return next(equal, math.ceil(n_tokens / fewest / TILE) * TILE)
