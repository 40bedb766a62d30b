"""The general form, shared by the kernels: distances, the tables a(t) and m(t), the gain, masks.

L_ij = a(i − j)·g(n_i)·S_ij + m(i − j) where j is visible from i, −∞ elsewhere;  S = q·k/√D
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from anlit.nn.kernels.documents import Documents
from anlit.nn.layers.precision import wide_dtype
from anlit.nn.mechanisms.coefficient import learned_coefficients
from anlit.nn.mechanisms.mechanism import Mechanism


def distance_tables(
    mechanism: Mechanism, length: int, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """a(t) and m(t) for t < length, (length,), (H or 1, length) or None, in float32 at least."""
    t = torch.arange(length, device=like.device, dtype=wide_dtype(like))
    return mechanism.distance_gain(t), mechanism.distance_bias(t)


def tables_are_learned(mechanism: Mechanism) -> bool:
    """Whether a(t) or m(t) has a gradient, by a parameter or a coefficient that layers share."""
    parameters = list(mechanism.parameters())
    for coefficient in learned_coefficients(mechanism):
        parameters.extend(coefficient.parameters())
    if not parameters:
        return False
    tables = distance_tables(mechanism, 2, parameters[0])
    return any(table is not None and table.requires_grad for table in tables)


def with_gain(q: Tensor, mechanism: Mechanism, documents: Documents) -> Tensor:
    """g(n_i)·q_i, (B, H, T, D): its product with k is √D·g·S."""
    n = documents.n_visible(wide_dtype(q), mechanism.window)
    gain = mechanism.gain(n[:, None])
    return q if gain is None else q * gain[..., None].to(q.dtype)


def distances(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    """i − j for queries at the last keys: (queries, keys) int64, negative if a key is ahead."""
    keys = torch.arange(n_keys, device=device)
    return keys[n_keys - n_queries :, None] - keys


def masked_bias(
    m: Tensor | None,
    t: Tensor,
    documents: Documents,
    window: int | None,
    first: int,
    dtype: torch.dtype,
) -> Tensor:
    """m at distances t, −∞ where a key is not visible: (B or 1, H or 1, queries, keys).

    Args:
        m: The table m(t); None for 0.
        t: Distances (queries, keys).
        documents: The documents of the batch.
        window: The mechanism's window.
        first: The number of the first query.
        dtype: The precision of the result.
    """
    is_square = t.shape == (documents.length, documents.length)
    is_visible = documents.mask(window) if is_square else documents.sees(first, t, window)
    bias = torch.zeros((), device=t.device) if m is None else m[..., t.clamp_min(0)]
    return torch.where(is_visible, bias.to(dtype), float("-inf"))


def first_key(first: int, window: int | None) -> int:
    """The first key that a query from `first` on can see, whatever its document."""
    return 0 if window is None else max(0, first - window + 1)


def empty_heads(like: Tensor) -> Tensor:
    """Uninitialised (B, H, T, D), in memory as (B, T, H, D), the layout of the projections."""
    B, H, T, D = like.shape
    return like.new_empty(B, T, H, D).transpose(1, 2)


def count_flops(forward: Any, backward: Any, window_index: int) -> None:
    """Let torch's FLOP counter count a kernel's matrix products, without recomputation.

    It counts the visible pairs as if each sequence was one document. `window_index` is the index of
    the argument `window` after q in `forward`.
    """
    register_flop_formula(forward)(partial(_forward_flops, window_index))
    register_flop_formula(backward)(partial(_backward_flops, window_index))


def _forward_flops(window_index: int, q_shape: torch.Size, *arguments: Any, **_: Any) -> int:
    """The products q·k and weights·v."""
    return 2 * _product_flops(q_shape, arguments[window_index])


def _backward_flops(
    window_index: int, d_out_shape: torch.Size, q_shape: torch.Size, *arguments: Any, **_: Any
) -> int:
    """The products for the gradients of weights, v, q and k."""
    return 4 * _product_flops(q_shape, arguments[window_index])


def _product_flops(q_shape: torch.Size, window: int | None) -> int:
    """One product over all visible pairs of queries and keys."""
    B, H, T, D = q_shape
    width = T if window is None else min(window, T)
    return 2 * D * B * H * (T * width - math.comb(width, 2))
