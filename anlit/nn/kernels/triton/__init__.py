"""Fused kernels in Triton for the general form: a(t) and m(t) as tables over distance.

g multiplies q beforehand. The two tables cost a load per score of near keys. They cost nearly
nothing for far keys. Blocks of keys outside the queries' documents or windows are skipped. If a(t)
or m(t) depends on a learned coefficient, the kernel for dq computes its gradient too.

    tables.py            a(t) and m(t), their derivative, lines for far tiles.
    operator.py          the operators for torch, which launch the kernels.
    blocks.py            the block sizes by device.
    tiles.py             functions that the kernels share.
    forward.py           out and lse.
    backward_queries.py  dq, the coefficient's gradient.
    backward_keys.py     dk and dv.
"""

import os

import torch
from torch import Tensor

from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.formula import tables_are_learned, with_gain
from anlit.nn.kernels.triton.operator import triton_attention
from anlit.nn.kernels.triton.tables import find_coefficient, linear_tables, make_tables
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.packages import install_advice, is_installed

IS_INSTALLED = is_installed("triton")
"""Checked once at import, because torch 2.11 cannot compile a function that looks it up."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The precisions that the kernels compute."""

WIDEST_HEAD = 256
"""The largest head width."""

OLDEST_CAPABILITY = (8, 0)
"""The first compute capability that has bfloat16 in its matrix units."""


def unsupported_reason(mechanism: Mechanism, q: Tensor | None = None) -> str | None:
    """Return a reason against several learned coefficients, and against some forms of `q`."""
    if not IS_INSTALLED:
        return f"triton is not installed: {install_advice('triton', 'triton')}"
    if tables_are_learned(mechanism) and find_coefficient(mechanism) is None:
        return "its a(t) or m(t) is learned, and not by one Coefficient alone"
    if q is None:
        return None
    if q.shape[-1] > WIDEST_HEAD:
        return f"its heads are at most {WIDEST_HEAD} wide, not {q.shape[-1]}"
    if q.dtype not in DTYPES:
        dtype = str(q.dtype).removeprefix("torch.")
        return f"it computes in bfloat16, float16 or float32, not {dtype}"
    device_type = q.device.type
    is_interpreted = device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device_type != "cuda" and not is_interpreted:
        return (
            f"it runs on a GPU, not on {device_type} (on cpu, for tests, with TRITON_INTERPRET=1)"
        )
    is_nvidia = device_type == "cuda" and torch.version.hip is None
    if is_nvidia and torch.cuda.get_device_capability(q.device) < OLDEST_CAPABILITY:
        major, minor = OLDEST_CAPABILITY
        return f"it needs a GPU of compute capability {major}.{minor} or newer"
    return None


def attend(
    q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float
) -> Tensor:
    """softmax(a·g·S + m) v."""
    q = with_gain(q, mechanism, documents)
    tables, coefficient, tangents = make_tables(mechanism, q)
    lines, far_start = linear_tables(tables, q.shape[-1], q.dtype)
    starts, ends = documents.bounds or (None, None)
    window = mechanism.window
    if window is not None and window >= q.shape[-2]:
        window = None
    out, _ = triton_attention(
        q, k, v, coefficient, tables, tangents, lines, far_start, starts, ends, window
    )
    return out
