"""The kernel that no kernel is better than: everything in float64 but what the matrix units take, the weights and the
gradients of the logits, and what is stored. A test that it fails asks for more than the precision allows.
"""

from typing import Any

import torch
from torch import Tensor

from anlit.attention.backends import eager
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism


class _Attention(torch.autograd.Function):
    """softmax(L) v of L (B, H, T, T) in float64 and v (B, H, T, D)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, v: Tensor) -> Tensor:
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        total = weights.sum(-1, keepdim=True)
        out = (weights.to(v.dtype).double() @ v.double() / total).to(v.dtype)
        ctx.save_for_backward(weights / total, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        weights, v, out = ctx.saved_tensors
        gradient = gradients[0].double()
        of_weights = gradient @ v.double().mT
        of_logits = weights * (of_weights - (gradient * out.double()).sum(-1, keepdim=True))
        return of_logits.to(v.dtype).double(), (weights.to(v.dtype).double().mT @ gradient).to(v.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float) -> Tensor:
    """As a back end's; g(n) is multiplied to q before, in q's own precision, as the back ends do."""
    T = q.shape[-2]
    a, m = eager.distance_tables(mechanism, T, q.double())
    q = eager.with_gain(q, mechanism, documents)
    logits = (q.double() * q.shape[-1] ** -0.5) @ k.double().mT
    index = torch.arange(T)
    distances = (index[:, None] - index).clamp_min(0)
    logits = logits if a is None else logits * a[..., distances]
    logits = logits if m is None else logits + m[..., distances]
    return _Attention.apply(logits.masked_fill(~documents.mask(mechanism.window), -torch.inf), v)
