"""Flash attention from libraries, for mechanisms with a(t) = 1 and no m(t) other than ALiBi's.

PyTorch's `varlen_attn` computes it, ALiBi's slopes the package flash-attn. Documents are sequences of varying length.
`torch.nn.attention.activate_flash_attention_impl("FA4")` lets PyTorch take the package flash-attn-4 for it.
"""

import importlib.util
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.formula import with_gain
from anlit.nn.kernels.grouped_heads import repeat_kv
from anlit.nn.mechanisms.alibi import ALiBi
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.nn.mechanisms.sliding_window import SlidingWindow

READS_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
"""Whether PyTorch's kernel takes keys that heads share; that of torch 2.11 does not."""
WIDEST_HEAD, OLDEST = 256, (8, 0)
"""OLDEST is the first compute capability that has bfloat16 in its matrix units."""
HAS_PACKAGE = getattr(importlib.util.find_spec("flash_attn"), "origin", None) is not None
"""Whether flash-attn 2 is there: flash-attn-4 alone has a folder of this name without a file of its own, so no origin.
Checked once at import, because torch 2.11 cannot compile a function that looks it up."""


def unsupported_reason(mechanism: Mechanism, q: Tensor | None = None) -> str | None:
    """What of the mechanism, the device, the precision or the width of `q` flash attention cannot do."""
    if mechanism.scales_with_distance:
        return "its gain a(t) changes logits by distance, which flash attention cannot"
    inner = mechanism.mechanism if isinstance(mechanism, SlidingWindow) else mechanism
    if inner.shifts_with_distance:
        if type(inner).distance_bias is not ALiBi.distance_bias:
            return "of all biases m(t), flash attention can only compute ALiBi's"
        if not HAS_PACKAGE:
            return "flash attention with ALiBi needs a package: pip install flash-attn --no-build-isolation"
    if q is None:
        return None
    if q.device.type != "cuda":
        return f"flash attention needs a CUDA device, and the model is on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention computes in bfloat16 or float16, not {str(q.dtype).removeprefix('torch.')}"
    if q.shape[-1] > WIDEST_HEAD or q.shape[-1] % 8:
        return (
            f"flash attention needs a head width of 8, 16 … {WIDEST_HEAD} here, not {q.shape[-1]}"
        )
    if torch.cuda.get_device_capability(q.device) < OLDEST:
        return f"flash attention needs a GPU of compute capability {OLDEST[0]}.{OLDEST[1]} (A100) or above"
    return None


def prepare(mechanism: Mechanism, documents: Documents, n_rows: int) -> None:
    """Copy `cu_seqlens` to the device."""
    documents.packing(n_rows)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float
) -> Tensor:
    """softmax(g·S + m) v."""
    rows, m = q.shape[0], mechanism.distance_bias(torch.ones(1, device=q.device))
    if m is None and not READS_GROUPS:
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    window = (-1 if mechanism.window is None else mechanism.window - 1, 0)
    q = with_gain(q, mechanism, documents)
    starts, longest = documents.packing(rows)
    qkv = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B·T, H or G, D)
    given: tuple[Any, ...] = (*qkv, starts, starts, longest.shape[0], longest.shape[0])
    if m is None:
        grouped: dict[str, Any] = {} if k.shape[1] == q.shape[1] else {"enable_gqa": True}
        out = varlen.varlen_attn(*given, window_size=window, **grouped)
    else:
        from flash_attn import flash_attn_varlen_func

        out = flash_attn_varlen_func(
            *given, causal=True, window_size=window, alibi_slopes=-m[:, 0].float(),  # m(t) = −slope·t
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
    return out.unflatten(0, (rows, -1)).transpose(1, 2)  # type: ignore[union-attr]
