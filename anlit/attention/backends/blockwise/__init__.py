"""Our own attention for CPUs: every mechanism costs about as much as plain attention. 128 queries are a block.

Gradients are written by hand, so no T × T matrix is ever made. Keys that no query of a block can see are skipped. The
tables of a and m over distance are stored as one matrix that all blocks slice, so no index per pair is needed. The
causal mask and the window are −∞ in the matrix of m and cost nothing extra.

The operations are many and small, so the sequences are divided among threads of one core each: see `workers`.
"""

import torch
from torch import Tensor

from anlit.attention.backends.blockwise.operator import blockwise_attention
from anlit.attention.backends.eager import distance_tables, with_gain
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism

GROUPED = True
SHARED_PAIRS = 2**17
"""From this number of query-key pairs on, over sequences and heads, several threads are faster than one."""


def reason_against(mechanism: Mechanism, q: Tensor | None = None, dropout: float = 0.0) -> str | None:
    """Why this back end cannot do `mechanism`, or None if it can."""
    if dropout:
        return "it does not drop attention weights"
    if q is not None and q.device.type != "cpu":
        return f"it is made for CPUs, and the model is on {q.device.type}"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float) -> Tensor:
    """softmax(a·g·S + m) v for q (B, H, T, D), k and v (B, G, T, D); computed in float32 at least."""
    a, m = distance_tables(mechanism, q.shape[-2], q)
    rows = with_gain(q, mechanism, documents)
    starts = documents.bounds[0] if documents.bounds is not None else None
    need_gradients = [x for x in (rows, k, v, a, m) if x is not None and x.requires_grad]
    keeps = torch.is_grad_enabled() and len(need_gradients) > 0  # torch 2.11 cannot compile bool of a list
    wide = torch.promote_types(q.dtype, torch.float32)
    inputs = (x.to(wide) for x in (rows, k, v))
    n_pairs = q.shape[0] * q.shape[1] * q.shape[2] ** 2
    n_shares = _n_threads() if n_pairs >= SHARED_PAIRS else 1
    out, _ = blockwise_attention(*inputs, a, m, starts, mechanism.window, keeps, n_shares)
    return out.to(v.dtype)


@torch.compiler.assume_constant_result
def _n_threads() -> int:
    return torch.get_num_threads()


def prepare(mechanism: Mechanism, documents: Documents, n_rows: int) -> None:
    """Find where the documents begin, once for all layers."""
    _ = documents.bounds
