"""How many floating-point operations a token costs in training: what MFU and the days of a run are counted with.

Counted are the matrix products that the formulas ask for, a multiplication and an addition as two: forward once and
backward twice. Not counted are elementwise work (norms, rotations, softmax, scaling vectors, the products of scales
with weights; together about one percent, and it runs at memory speed), what a kernel or activation checkpointing
computes again in the backward pass, and masked logits that a kernel computes all the same. So MFU is the share of the
peak that did what the model needs, whatever the back end and the memory settings.
"""

from collections.abc import Iterator

from torch import nn

from anlit.attention.attention import Attention

FORWARD_AND_BACKWARD = 3
"""The backward pass has two products for each of the forward pass."""


def mean_visible_keys(length: int, window: int | None = None) -> float:
    """Mean over queries 1 … `length` of one document of min(i, window), the keys that query i sees."""
    width = length if window is None else min(window, length)
    return width - width * (width - 1) / (2 * length)


def flops_per_token(model: nn.Module, length: int, mean_keys: float | None = None) -> float:
    """FLOPs of one training step per token, for a decoder of any architecture and mechanism.

    6 for every weight of a linear map (the embedding is a look-up), gates included; and 12·d a layer for every key
    that a query sees on average: 2·d for q·k, 2·d for weights·v, three times.

    Args:
        model: A decoder; its blocks hold an `Attention` each.
        length: T, tokens in a sequence.
        mean_keys: Keys that a query sees on average. If not given, each layer's for sequences that are one document:
            (T + 1)/2, less with a window. Packed documents need less, so for them this is an upper bound.
    """
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    pairs = 0.0
    for attention in attention_layers_of(model):
        mechanism = attention.mechanism
        width = mechanism.n_heads * mechanism.d_head
        pairs += width * (mean_visible_keys(length, mechanism.window) if mean_keys is None else mean_keys)
    return FORWARD_AND_BACKWARD * (2.0 * linear + 4.0 * pairs)


def attention_layers_of(model: nn.Module) -> Iterator[Attention]:
    """The attention of every layer, in order."""
    return (module for module in model.modules() if isinstance(module, Attention))
