"""cuDNN's fused attention, which PyTorch has: the fastest published for plain attention on Hopper, without documents.

For mechanisms of g(n) alone, which multiplies q. PyTorch gives cuDNN no lengths of packed documents and no window, so
those are refused and never become a mask; `flash` computes them. No GPU has run this.
"""

from typing import Any

import torch
from torch import Tensor

from anlit.attention.backends.eager import with_gain
from anlit.attention.backends.libraries import reason_against_age, reason_against_precision, reason_against_width
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism
from anlit.errors import UserError

LIBRARY = "cuDNN's attention"
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
    reason = (
        reason_against_precision(LIBRARY, q, needs_nvidia=True)
        or reason_against_width(LIBRARY, q, WIDEST_HEAD)
        or reason_against_age(LIBRARY, q)
    )
    if reason is None and torch.are_deterministic_algorithms_enabled():
        reason = "cuDNN's gradients are not the same twice, and deterministic algorithms are asked for"
    return reason


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
