"""Floating-point operations of training per token, for MFU and for estimates of a run's time.

This counts the matrix products in the formulas, once for the forward and twice for the backward pass; a multiplication
and an addition are two operations. It does not count elementwise work (norms, rotations, softmax, scaling vectors,
products of scales and weights; together about one percent, at memory speed), recomputation in the backward pass, or
masked logits that a kernel computes anyway. So MFU is the share of the peak spent on what the model needs, whatever the
kernel and the memory settings.
"""

from torch import nn

from anlit.nn.attention.attention import attention_layers

FORWARD_AND_BACKWARD = 3
"""The backward pass has two products for each of the forward pass."""


def mean_visible_keys(length: int, window: int | None = None) -> float:
    """Mean over queries 1 … `length` of one document of min(i, window), the keys that query i sees."""
    width = length if window is None else min(window, length)
    return width - width * (width - 1) / (2 * length)


def flops_per_token(model: nn.Module, length: int) -> float:
    """FLOPs of one training step per token, for a decoder of any architecture and mechanism.

    6 for every weight of a linear map, gates included (the embedding is a look-up), and 12·H·D per layer for every
    key that a query sees on average: 2·H·D for q·k and 2·H·D for weights·v, times 3. Heads that share keys save none.
    The average is that of sequences of one document of `length` tokens, an upper bound for packed documents.
    """
    linear = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)
    )
    mechanisms = [attention.mechanism for attention in attention_layers(model)]
    pairs = sum(
        each.n_heads * each.d_head * mean_visible_keys(length, each.window) for each in mechanisms
    )
    return FORWARD_AND_BACKWARD * (2.0 * linear + 4.0 * pairs)
