"""a(t) and m(t) as the kernels read them, and their derivative by a learned coefficient."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from anlit.attention.backends.eager import distance_tables, tables_are_learned
from anlit.attention.backends.triton.blocks import PADDING
from anlit.attention.coefficient import Coefficient, learned_coefficients
from anlit.attention.mechanism import Mechanism


def unsupported_coefficients(mechanism: Mechanism) -> str | None:
    """Why the kernels cannot give the gradients of what a(t) and m(t) learn, None if they can."""
    if not tables_are_learned(mechanism) or _coefficient_of(mechanism) is not None:
        return None
    return "its a(t) or m(t) is learned, and not by one Coefficient alone"


def _coefficient_of(mechanism: Mechanism) -> Coefficient | None:
    """The learned coefficient without which a(t) and m(t) would have no gradient; None if there is no such one."""
    for coefficient in learned_coefficients(mechanism):
        assert coefficient.value is not None
        with coefficient.replaced_by(coefficient.value.detach()):
            if not tables_are_learned(mechanism):
                return coefficient
    return None


class Tables(NamedTuple):
    """What the operator reads of a mechanism; None without such tables, and without a learned coefficient for them."""

    tables: Tensor | None
    """As `interleave` returns them, without a gradient."""
    coefficient: Tensor | None
    """(H or 1,), the learned number on which the tables depend."""
    tangents: Tensor | None
    """(H or 1, T + PADDING, 2 or 1), the tables' derivative by it; of last size 1 if only m(t) depends on it."""


def tables_of(mechanism: Mechanism, like: Tensor) -> Tables:
    """The tables for queries such as `like`, (B, H, T, D).

    If the mechanism learns one coefficient per head, a head's tables may depend on its own only.
    """
    length, width = like.shape[-2] + PADDING, like.shape[-1]
    a, m = distance_tables(mechanism, length, like)
    tables = interleave(a, m, width)
    if tables is None or not tables.requires_grad:
        return Tables(tables, None, None)
    coefficient = _coefficient_of(mechanism)
    assert coefficient is not None
    assert coefficient.value is not None

    def packed(value: Tensor) -> Tensor | None:
        with coefficient.replaced_by(value):
            gains, biases = distance_tables(mechanism, length, like)
        return interleave(gains if a is not None and a.requires_grad else None, biases, width)

    value = coefficient.value.detach()
    tangents = torch.func.jvp(packed, (value,), (torch.ones_like(value),))[1]
    return Tables(tables.detach(), coefficient.value, tangents.contiguous())


def interleave(a: Tensor | None, m: Tensor | None, width: int) -> Tensor | None:
    """a(t) and m(t) for the kernels: (H or 1, T + PADDING, 2 or 1), float32, in base 2, with a divided by √D."""
    biases = None if m is None else (m * math.log2(math.e)).float().reshape(-1, m.shape[-1])
    if a is None:
        return None if biases is None else biases[..., None].contiguous()
    gains = (a * (math.log2(math.e) * width**-0.5)).float().reshape(-1, a.shape[-1])
    biases = torch.zeros_like(gains) if biases is None else biases
    return torch.stack(torch.broadcast_tensors(gains, biases), -1)
