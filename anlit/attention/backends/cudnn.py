"""cuDNN's fused attention, which PyTorch has: the fastest published for plain attention on Hopper, without documents.

For mechanisms of g(n) alone, which multiplies q. PyTorch gives cuDNN no lengths of packed documents and no window, so
those are refused and never become a mask; `flash` computes them. No GPU has run this.
"""

from typing import Any

import torch
from torch import Tensor

from anlit.attention.backends.eager import with_gain
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism
from anlit.errors import UserError

WIDEST_HEAD = 128

_aten: Any = torch.ops.aten


def reason_against(mechanism: Mechanism, q: Tensor | None = None, dropout: float = 0.0) -> str | None:
    """Why this back end cannot compute `mechanism` for queries like `q`, None if it can. It cannot do documents."""
    if mechanism.depends_on_distance:
        return "it changes logits by distance or has a window, which cuDNN's attention cannot"
    if dropout:
        return f"this cuDNN attention has no dropout, and dropout is {dropout:g}"
    if q is None:
        return None
    if q.device.type != "cuda" or torch.version.hip is not None:
        return f"cuDNN needs an NVIDIA GPU, and the model is on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"cuDNN's attention computes in bfloat16 or float16, not {str(q.dtype).removeprefix('torch.')}"
    if q.shape[-1] > WIDEST_HEAD or q.shape[-1] % 8:
        return f"cuDNN's attention needs a head width of 8, 16 … {WIDEST_HEAD}, not {q.shape[-1]}"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "cuDNN's attention needs a GPU of compute capability 8.0 (A100) or above"
    if torch.are_deterministic_algorithms_enabled():
        return "cuDNN's gradients are not the same twice, and deterministic algorithms are asked for"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float) -> Tensor:
    """softmax(g·S) v, all of shape (B, H, T, D).

    Raises:
        UserError: Documents are masked.
    """
    assert not dropout
    if documents.are_masked:
        raise UserError("backend='cudnn' cannot mask documents; choose backend flash, or document_masking false")
    q = with_gain(q, mechanism, documents)
    keeps_log_sum = True  # the backward pass reads it
    out, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, keeps_log_sum, 0.0, True)
    return out  # type: ignore[no-any-return]
