"""Next-token cross-entropy from hidden states, without ever holding all logits.

At V = 50,304 and 16,384 tokens the logits are 3.3 GB in float32. The usual way holds several such
tensors. The gradient of a mean cross-entropy needs nothing from later tokens. So
`linear_cross_entropy` takes a chunk of tokens at a time, as in Liger (arXiv 2410.10989). The chunk
goes through projection and softmax. Then it goes back to the gradients of hidden states and
projection. The backward pass only multiplies these gradients by the upstream gradient.

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
from anlit.nn.layers.precision import wide_dtype

IGNORE_INDEX = -100
"""Targets with this value do not count in the loss."""
CHUNK_NUMBERS = {"cpu": 2**20}
"""Logits in a chunk, by type of device. On a CPU they fit into its caches."""

DEFAULT_CHUNK_NUMBERS = 2**28
"""Logits in a chunk on other devices."""

TILE = 256
"""Chunks on other devices are multiples of this many tokens."""


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of the logits x·Wᵀ in nats per counted token, a chunk of tokens at a time.

    Returns the loss, without a gradient, and the objective, with a gradient. The objective is the
    loss plus z_loss · mean(log Z)². Both are 0 if no token counts. Products are computed in
    autocast's precision if autocast is on. Sums are in float32 at least. The forward pass computes
    the gradients. It stores N·d and V·d numbers. They can be used once and not differentiated
    again.

    Args:
        x, weight: Hidden states, (B, T, d), and W, (V, d).
        targets: (B, T), −100 where a token does not count.
        z_loss: Weight of the squared log-partition (arXiv 2204.02311).
        compiled: Compile the work on a chunk's logits: three passes over them instead of a dozen.
    """
    dtype = computing_dtype(x)
    needs_gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    chunk_losses = _compiled_chunk_losses() if compiled else _chunk_losses
    # Under autocast, autograd would record the conversions of all products.
    with torch.autocast(x.device.type, enabled=False):
        return _LinearCrossEntropy.apply(
            x.flatten(0, -2),
            weight,
            targets.flatten(),
            z_loss,
            dtype,
            needs_gradients,
            chunk_losses,
        )


ChunkLosses = tuple[Tensor, Tensor, Tensor | None]
"""Return the sums over counted rows of −log p(target) and of (log Z)². The third result is the
gradient of the mean objective by the logits, (rows, V), or None if nothing needs it."""


class _LinearCrossEntropy(torch.autograd.Function):
    """x (N, d), weight (V, d), targets (N,) → loss and objective. See `linear_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        z_loss: float,
        dtype: torch.dtype,
        needs_gradients: bool,
        chunk_losses: Callable[..., ChunkLosses],
    ) -> tuple[Tensor, Tensor]:
        n_counted = (targets != IGNORE_INDEX).sum().clamp_min(1)
        narrow_weight = weight.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        loss_sum = x.new_zeros((), dtype=wide)
        penalty_sum = x.new_zeros((), dtype=wide)
        dx: Any = torch.empty_like(x) if needs_gradients else None
        dweight: Any = torch.zeros_like(weight, dtype=wide) if needs_gradients else None
        size = chunk_size(x.device.type, weight.shape[0], weight.shape[1], x.shape[0])
        for first in range(0, x.shape[0], size):
            rows = x[first : first + size].to(dtype)
            chunk_loss, chunk_penalty, gradient = chunk_losses(
                rows @ narrow_weight.mT,
                targets[first : first + size],
                n_counted,
                z_loss,
                needs_gradients,
            )
            loss_sum += chunk_loss
            penalty_sum += chunk_penalty
            if gradient is not None:
                dx[first : first + size] = gradient @ narrow_weight
                _add_product(dweight, gradient.mT, rows)
        if needs_gradients:
            ctx.save_for_backward(dx, dweight.to(weight.dtype))
        loss = loss_sum / n_counted
        ctx.mark_non_differentiable(loss)
        return loss, loss + z_loss * penalty_sum / n_counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, upstream: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight = ctx.saved_tensors
        return dx.mul_(upstream), dweight.mul_(upstream), None, None, None, None, None


def _chunk_losses(
    logits: Tensor, targets: Tensor, n_counted: Tensor, z_loss: float, needs_gradients: bool
) -> ChunkLosses:
    """The losses of a chunk's logits (rows, V) for targets (rows,)."""
    wide = wide_dtype(logits)
    is_counted = (targets != IGNORE_INDEX)[:, None]
    target_columns = targets.clamp_min(0)[:, None]
    probabilities = logits.softmax(-1, dtype=wide)
    # The largest probability is exp(largest logit)/Z and at least 1/V: log Z without another
    # exponential.
    log_z = logits.amax(-1, keepdim=True).to(wide) - probabilities.amax(-1, keepdim=True).log()
    loss_sum = torch.where(is_counted, log_z - logits.gather(1, target_columns), 0).sum()
    penalty_sum = torch.where(is_counted, log_z.square(), 0).sum()
    if not needs_gradients:
        return loss_sum, penalty_sum, None
    weights = is_counted.to(wide) / n_counted
    factors = weights * (1 + 2 * z_loss * log_z) if z_loss else weights
    if torch.compiler.is_compiling():
        # A scatter would write all of it to memory in float32 first.
        is_target = torch.arange(logits.shape[1], device=logits.device) == target_columns
        gradient = probabilities * factors - torch.where(is_target, weights, 0)
    else:
        gradient = probabilities.mul_(factors).scatter_add_(1, target_columns, -weights)
    return loss_sum, penalty_sum, gradient.to(logits.dtype)


@cache
def _compiled_chunk_losses() -> Callable[..., ChunkLosses]:
    return torch.compile(_chunk_losses, dynamic=False)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, the sum over chunks in the precision of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda":
        # It saves a pass over `total`. On other devices torch does not have it.
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def chunk_size(device_type: str, vocab_size: int, width: int, n_tokens: int) -> int:
    """Tokens in a chunk. At least d, or adding to W's gradient would cost more than the logits.

    On a GPU chunks have equal size if possible, and are multiples of `TILE`. A smaller last chunk
    would be compiled separately. It would leave most of the device idle.
    """
    n_logits = CHUNK_NUMBERS.get(device_type, DEFAULT_CHUNK_NUMBERS)
    largest = max(width, n_logits // vocab_size)
    if device_type == "cpu":
        return largest
    fewest_chunks = math.ceil(n_tokens / largest)
    for n_chunks in range(fewest_chunks, 2 * fewest_chunks):
        if n_tokens % (n_chunks * TILE) == 0:
            return n_tokens // n_chunks
    return math.ceil(n_tokens / fewest_chunks / TILE) * TILE
