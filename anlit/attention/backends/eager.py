"""The readable back end: the general form written out. Exact, differentiable, any mechanism, any device."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism

QUERIES_PER_BLOCK = 512


def reason_against(mechanism: Mechanism) -> str | None:
    """Why this back end cannot do `mechanism`: it can do all."""
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float) -> Tensor:
    """softmax(a·g·S + m) v, all of shape (B, H, T, D); q and k of unit root mean square.

    Queries are taken in blocks of 512 and, if there are several, each block's logits are recomputed in the
    backward pass, so memory grows with 512·T and not with T².
    """
    length = q.shape[-2]
    wide = torch.promote_types(q.dtype, torch.float32)
    distances = torch.arange(length, device=q.device, dtype=wide)
    a, m = mechanism.distance_gain(distances), mechanism.distance_bias(distances)
    gain = mechanism.gain(documents.n_visible(wide)[:, None])
    q = q * q.shape[-1] ** -0.5
    if gain is not None:
        q = q * gain[..., None].to(q.dtype)

    def block(first: int, q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, m: Tensor | None) -> Tensor:
        end = first + q.shape[-2]
        visible = documents.mask() if end == length and first == 0 else documents.visible(first, end)
        index = _distances(first, end, q.device)
        bias = torch.where(visible, m[..., index] if m is not None else q.new_zeros((), dtype=wide), float("-inf"))
        logits = (q @ k[..., :end, :].mT).to(wide)
        logits = logits + bias if a is None else torch.addcmul(bias, logits, a[..., index])
        weights = logits.softmax(-1).to(v.dtype)
        weights = torch.nn.functional.dropout(weights, dropout) if dropout else weights
        return weights @ v[..., :end, :]

    if length <= QUERIES_PER_BLOCK:
        return block(0, q, k, v, a, m)
    return torch.cat(
        [
            checkpoint(block, first, rows, k, v, a, m, use_reentrant=False)
            for first, rows in zip(range(0, length, QUERIES_PER_BLOCK), q.split(QUERIES_PER_BLOCK, -2), strict=True)
        ],
        dim=-2,
    )


def _distances(first: int, end: int, device: torch.device) -> Tensor:
    """i − j for queries [first, end) and keys [0, end), 0 where the key is ahead: (queries, end), int64."""
    queries = torch.arange(first, end, device=device)
    return (queries[:, None] - torch.arange(end, device=device)).clamp_min(0)
