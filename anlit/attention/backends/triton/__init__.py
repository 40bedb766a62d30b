"""Our own fused kernels, in Triton, for the general form: a(t) and m(t) as tables over distance.

The logits are a(i−j)·g(n_i)·S_ij + m(i−j). g multiplies q beforehand, and the two tables cost one load per score.
Blocks of keys outside the queries' documents or windows are skipped. A separate kernel computes the gradient of the
tables, if they are learned.

    operator.py          the operators for torch     launch.py       grids, strides, pointers
    blocks.py            block sizes by device       registers.py    the kernels' resources, without a GPU
    forward.py           out and lse                 diagonals.py    the gradients of the tables
    backward_queries.py  dq                          backward_keys.py    dk and dv
    tiles.py             functions that the kernels share
"""

import importlib.util
import math
import os

import torch
from torch import Tensor

from anlit.attention.backends.eager import distance_tables
from anlit.attention.backends.triton.blocks import PADDING
from anlit.attention.backends.triton.operator import triton_attention
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism
from anlit.errors import UserError

IS_INSTALLED = importlib.util.find_spec("triton") is not None
"""Checked once at import, because torch 2.11 cannot compile a function that looks it up."""
WIDEST = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST = (8, 0)
"""The first compute capability that has bfloat16 in its matrix units."""


def reason_against(mechanism: Mechanism, q: Tensor | None = None, dropout: float = 0.0) -> str | None:
    """Why this back end cannot compute `mechanism`, None if it can; `q` gives device, dtype and head width."""
    if not IS_INSTALLED:
        return "triton is not installed (make extras EXTRAS=triton)"
    if dropout:
        return f"it has no dropout, and dropout is {dropout}"
    if q is None:
        return None
    if q.shape[-1] > WIDEST:
        return f"its heads are at most {WIDEST} wide, not {q.shape[-1]}"
    if q.dtype not in DTYPES:
        return f"it computes in bfloat16, float16 or float32, not {str(q.dtype).removeprefix('torch.')}"
    return _reason_against_device(q.device)


def _reason_against_device(device: torch.device) -> str | None:
    if device.type == "cuda":
        if torch.version.hip is None and torch.cuda.get_device_capability(device) < OLDEST:
            return f"it needs a GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or newer"
        return None
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"it runs on a GPU, not on {device.type} (on cpu, for tests, with TRITON_INTERPRET=1)"


def prepare(mechanism: Mechanism, documents: Documents, n_rows: int) -> None:
    """Find where each token's document begins and ends."""
    _ = documents.bounds


def attend(q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float) -> Tensor:
    """softmax(a·g·S + m) v: q (B, H, T, D) and k of unit root mean square, k and v (B, H_kv, T, D) → (B, H, T, D).

    Under autocast q, k and v are converted to its dtype, as for matrix products.

    Raises:
        UserError: This back end does not support the dropout, dtype, head width or device.
    """
    length, width = q.shape[-2:]
    wide = torch.promote_types(q.dtype, torch.float32)
    gain = mechanism.gain(documents.n_visible(wide, mechanism.window)[:, None])
    if gain is not None:
        q = q * gain[..., None].to(q.dtype)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if (reason := reason_against(mechanism, q, dropout)) is not None:
        raise UserError(f"backend='triton' cannot compute this attention: {reason}; choose backend auto")
    a, m = distance_tables(mechanism, length + PADDING, q)
    bounds = documents.bounds or (None, None)
    window = mechanism.window if mechanism.window is not None and mechanism.window < length else None
    out, _ = triton_attention(q, k, v, _tables(a, m, width), *bounds, window)
    return out


def _tables(a: Tensor | None, m: Tensor | None, width: int) -> Tensor | None:
    """a(t) and m(t) for the kernels: (H or 1, T + PADDING, 2 or 1), float32, in base 2, with a divided by √D."""
    biases = None if m is None else (m * math.log2(math.e)).float().reshape(-1, m.shape[-1])
    if a is None:
        return None if biases is None else biases[..., None].contiguous()
    gains = (a * (math.log2(math.e) * width**-0.5)).float().reshape(-1, a.shape[-1])
    biases = torch.zeros_like(gains) if biases is None else biases
    return torch.stack(torch.broadcast_tensors(gains, biases), -1)
