"""Floating-point operations of training per token, for MFU and for estimates of a run's time.

The matrix products in the formulas are counted. The forward pass has each once, the backward pass
twice. A multiplication and an addition are two operations. Elementwise work is not counted: norms,
rotations, softmax, scaling vectors, products of scales and weights. Together it is about a percent,
at memory speed. Recomputation in the backward pass and masked logits are not counted either. So MFU
is the share of the peak spent on the model's needs. Kernel and memory settings do not matter.
"""

from torch import Tensor, nn

from anlit.nn.attention.attention import attention_layers

FORWARD_AND_BACKWARD = 3
"""The backward pass has two products for each of the forward pass."""


def mean_visible_keys(length: int, window: int | None = None) -> float:
    """Mean of min(i, window), the keys that query i sees, for i = 1 … `length` of a document."""
    width = length if window is None else min(window, length)
    return width - width * (width - 1) / (2 * length)


def flops_per_token(model: nn.Module, length: int, positions: Tensor | None = None) -> float:
    """FLOPs of one training step per token, for a decoder of any architecture and mechanism.

    Each weight of a linear map costs 6, gates included. The embedding is a look-up. Each key that a
    query sees on average costs 12·H·D per layer. That is 2·H·D for q·k and 2·H·D for weights·v,
    times 3. Heads that share keys save nothing.

    Args:
        model: The decoder.
        length: Tokens of a sequence.
        positions: Each token's position in its document, (B, T). Without it a sequence is one
            document, which gives an upper bound for packed documents.
    """
    n_weights = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            n_weights += module.weight.numel()
    width_times_keys = 0.0
    for attention in attention_layers(model):
        mechanism = attention.mechanism
        width = mechanism.n_heads * mechanism.d_head
        if positions is None:
            n_keys = mean_visible_keys(length, mechanism.window)
        else:
            n_keys = (positions + 1).clamp_max(mechanism.window or length).double().mean().item()
        width_times_keys += width * n_keys
    return FORWARD_AND_BACKWARD * (2.0 * n_weights + 4.0 * width_times_keys)
