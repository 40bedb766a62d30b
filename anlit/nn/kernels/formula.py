"""The general form, shared by the kernels: distances, the tables a(t) and m(t), the gain, masks.

L_ij = a(i − j)·g(n_i)·S_ij + m(i − j) where j is visible from i, −∞ elsewhere;  S = q·k/√D
"""

import torch
from torch import Tensor

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
    """Whether a(t) or m(t) has a gradient, by a parameter or a coefficient that layers share.

    The answer is for training, even if asked where gradients are off, as in `Attention.prepare`.
    """
    parameters = list(mechanism.parameters())
    for coefficient in learned_coefficients(mechanism):
        parameters.extend(coefficient.parameters())
    if not parameters:
        return False
    with torch.enable_grad():
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
        m: The table m(t). None for 0.
        t: Distances (queries, keys).
        documents: The documents of the batch.
        window: The mechanism's window.
        first: The number of the first query.
        dtype: The precision of the result.
    """
    is_visible = documents.sees(first, t, window)
    bias = torch.zeros((), device=t.device) if m is None else m[..., t.clamp_min(0)]
    return torch.where(is_visible, bias.to(dtype), float("-inf"))


def first_key(first: int, window: int | None) -> int:
    """The first key that a query from `first` on can see, whatever its document."""
    return 0 if window is None else max(0, first - window + 1)


def empty_heads(like: Tensor) -> Tensor:
    """Uninitialised (B, H, T, D), in memory as (B, T, H, D), the layout of the projections."""
    B, H, T, D = like.shape
    return like.new_empty(B, T, H, D).transpose(1, 2)
