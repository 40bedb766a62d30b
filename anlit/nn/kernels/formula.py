"""What all kernels share of the general form: distances, the tables a(t) and m(t), the gain, masks.

L_ij = a(i − j)·g(n_i)·S_ij + m(i − j) where j is visible from i, −∞ elsewhere;  S = q·k/√D
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from anlit.nn.kernels.documents import Documents
from anlit.nn.mechanisms.coefficient import learned_coefficients
from anlit.nn.mechanisms.mechanism import Mechanism


def distance_tables(
    mechanism: Mechanism, length: int, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """a(t) and m(t) for t = 0 … length − 1, each (length,), (H or 1, length) or None, in float32 at least."""
    distances = torch.arange(
        length, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32)
    )
    return mechanism.distance_gain(distances), mechanism.distance_bias(distances)


def tables_are_learned(mechanism: Mechanism) -> bool:
    """Whether a(t) or m(t) has a gradient, because of the mechanism's parameters or of what it shares."""
    learned = [
        p for part in (*learned_coefficients(mechanism), mechanism) for p in part.parameters()
    ]
    tables = distance_tables(mechanism, 2, learned[0]) if learned else ()
    return any(table is not None and table.requires_grad for table in tables)


def with_gain(q: Tensor, mechanism: Mechanism, documents: Documents) -> Tensor:
    """g(n_i)·q_i, (B, H, T, D): its product with k is √D·g·S."""
    wide = torch.promote_types(q.dtype, torch.float32)
    gain = mechanism.gain(documents.n_visible(wide, mechanism.window)[:, None])
    return q if gain is None else q * gain[..., None].to(q.dtype)


def distances(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    """i − j for keys of which the last ones are the queries' own: (queries, keys) int64, negative if a key is ahead."""
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
    """m at distances t, (queries, keys), of queries from number `first` on, −∞ where a key is not visible:
    (B or 1, H or 1, queries, keys)."""
    is_all = t.shape == (documents.length, documents.length)
    visible = documents.mask(window) if is_all else documents.sees(first, t, window)
    values = torch.zeros((), device=t.device) if m is None else m[..., t.clamp_min(0)]
    return torch.where(visible, values.to(dtype), float("-inf"))


def first_key(first: int, window: int | None) -> int:
    """The first key that some query from `first` on sees, whatever its document."""
    return 0 if window is None else max(0, first - window + 1)


def empty_heads(like: Tensor) -> Tensor:
    """Uninitialised (B, H, T, D), in memory as (B, T, H, D), the layout of the projections."""
    B, H, T, D = like.shape
    return like.new_empty(B, T, H, D).transpose(1, 2)


def count_flops(forward: Any, backward: Any, window: int) -> None:
    """Let torch's FLOP counter count a kernel's products over the visible pairs of sequences of one document, without
    recomputation. `window` is the number of this argument among those that follow q.
    """

    def flops(products: int, q_shape: torch.Size, width: int | None) -> int:
        B, H, T, D = q_shape
        seen = T if width is None else min(width, T)
        return 2 * products * D * B * H * (T * seen - math.comb(seen, 2))

    register_flop_formula(forward)(lambda q, *others, **_: flops(2, q, others[window]))
    register_flop_formula(backward)(lambda d_out, q, *others, **_: flops(4, q, others[window]))
