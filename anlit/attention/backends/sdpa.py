"""PyTorch's scaled_dot_product_attention: fused kernels for every mechanism whose a(t) is 1."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism


def reason_against(mechanism: Mechanism) -> str | None:
    """Why this back end cannot do `mechanism`, or None if it can."""
    if mechanism.scales_with_distance:
        return "its gain a(t) changes logits by distance, which scaled_dot_product_attention cannot"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float) -> Tensor:
    """softmax(g·S + m) v, all of shape (B, H, T, D); g goes into q, m and the documents into a mask (…, T, T)."""
    length = q.shape[-2]
    wide = torch.promote_types(q.dtype, torch.float32)
    gain = mechanism.gain(documents.n_visible(wide)[:, None])
    if gain is not None:
        q = q * gain[..., None].to(q.dtype)
    m = mechanism.distance_bias(torch.arange(length, device=q.device, dtype=wide))
    if m is None and not documents.are_masked:
        return scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
    mask = documents.mask()
    if m is not None:
        index = torch.arange(length, device=q.device)
        bias = m[..., (index[:, None] - index).clamp_min(0)]
        mask = torch.where(mask, bias, float("-inf")).to(q.dtype)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
