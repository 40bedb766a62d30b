"""Flash attention from libraries, for mechanisms with a(t) = 1 and no m(t) other than ALiBi's.

PyTorch's `varlen_attn` computes it, ALiBi's slopes the package flash-attn. Documents are sequences
of varying length. `torch.nn.attention.activate_flash_attention_impl("FA4")` lets PyTorch take the
package flash-attn-4 for it.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.formula import with_gain
from anlit.nn.kernels.grouped_heads import repeat_kv
from anlit.nn.kernels.launch_limits import too_large_for_flash
from anlit.nn.kernels.sdpa import has_little_shared_memory
from anlit.nn.mechanisms.alibi import ALiBi
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.nn.mechanisms.sliding_window import SlidingWindow
from anlit.packages import is_installed

READS_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
"""Whether PyTorch's kernel takes keys that heads share. Torch 2.11's does not."""

WIDEST_HEAD = 256
"""The largest head width of flash attention."""

OLDEST_CAPABILITY = (8, 0)
"""The first compute capability that has bfloat16 in its matrix units."""

HAS_PACKAGE = is_installed("flash_attn")
"""Whether flash-attn 2 is installed. flash-attn-4 alone has a folder of this name without an
`__init__.py`. So it has no origin. Checked once at import, because torch 2.11 cannot compile a
function that looks it up."""


def unsupported_reason(mechanism: Mechanism, q: Tensor | None = None) -> str | None:
    """Return a reason against a(t), m(t) unless it is ALiBi's, and some forms of `q`."""
    reason = _unsupported_mechanism(mechanism)
    if reason is None and q is not None:
        reason = _unsupported_queries(q)
    return reason


def _unsupported_mechanism(mechanism: Mechanism) -> str | None:
    if mechanism.scales_with_distance:
        return "its gain a(t) changes logits by distance, which flash attention cannot"
    inner = mechanism.mechanism if isinstance(mechanism, SlidingWindow) else mechanism
    if inner.shifts_with_distance:
        if type(inner).distance_bias is not ALiBi.distance_bias:
            return "of all biases m(t), flash attention can only compute ALiBi's"
        if not HAS_PACKAGE:
            return (
                "flash attention with ALiBi needs a package: "
                "pip install flash-attn --no-build-isolation"
            )
    return None


def _unsupported_queries(q: Tensor) -> str | None:
    if q.device.type != "cuda":
        return f"flash attention needs a CUDA device, and the model is on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        dtype = str(q.dtype).removeprefix("torch.")
        return f"flash attention computes in bfloat16 or float16, not {dtype}"
    width = q.shape[-1]
    if width > WIDEST_HEAD or width % 8:
        return f"flash attention needs a head width of 8, 16 … {WIDEST_HEAD} here, not {width}"
    if torch.cuda.get_device_capability(q.device) < OLDEST_CAPABILITY:
        major, minor = OLDEST_CAPABILITY
        return f"flash attention needs a GPU of compute capability {major}.{minor} (A100) or above"
    if q.requires_grad and 192 < width <= 224 and has_little_shared_memory():
        return f"flash attention has no gradient at head width {width} on this GPU"
    return None


def batch_limit(
    mechanism: Mechanism, q: Tensor, documents: Documents, n_rows: int, dropout: float
) -> str | None:
    """Return a reason against batches of very many documents."""
    starts, _ = documents.packing(n_rows)
    n_tokens = n_rows * documents.length
    sizes = (len(starts) - 1, n_tokens, mechanism.n_heads, mechanism.d_head)
    return too_large_for_flash(*sizes, q.requires_grad)


def prepare(mechanism: Mechanism, documents: Documents, n_rows: int) -> None:
    """Copy `cu_seqlens` to the device."""
    documents.packing(n_rows)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float
) -> Tensor:
    """softmax(g·S + m) v."""
    n_rows = q.shape[0]
    m = mechanism.distance_bias(torch.ones(1, device=q.device))
    if m is None and not READS_GROUPS:
        k = repeat_kv(k, q.shape[1])
        v = repeat_kv(v, q.shape[1])
    # Keys to the left and to the right of a query; −1 for all
    window = (-1 if mechanism.window is None else mechanism.window - 1, 0)
    q = with_gain(q, mechanism, documents)
    starts, size_of_longest = documents.packing(n_rows)
    longest = size_of_longest.shape[0]
    inputs: tuple[Any, ...] = (
        _flatten_rows(q),
        _flatten_rows(k),
        _flatten_rows(v),
        starts,
        starts,
        longest,
        longest,
    )
    if m is None:
        options: dict[str, Any] = {} if k.shape[1] == q.shape[1] else {"enable_gqa": True}
        out = varlen.varlen_attn(*inputs, window_size=window, **options)
    else:
        from flash_attn import flash_attn_varlen_func

        slopes = -m[:, 0].float()  # m(t) = −slope·t
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        out = flash_attn_varlen_func(
            *inputs,
            causal=True,
            window_size=window,
            alibi_slopes=slopes,
            deterministic=is_deterministic,
        )
    return out.unflatten(0, (n_rows, -1)).transpose(1, 2)  # type: ignore[union-attr]


def _flatten_rows(x: Tensor) -> Tensor:
    """(B, H, T, D) → (B·T, H, D)."""
    return x.transpose(1, 2).flatten(0, 1)
