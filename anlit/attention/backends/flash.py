"""Flash attention from libraries, for mechanisms with a(t) = 1 and no m(t) other than ALiBi's.

The package flash-attn computes it if it is installed, else PyTorch, which has the same kernels but no slopes. PyTorch
is preferred after `torch.nn.attention.activate_flash_attention_impl("FA4")`, which needs the package flash-attn-4. g(n)
multiplies q. For these kernels documents are sequences of varying length, so nothing is computed between documents:
PyTorch's operator for them is the one that `torch.nn.attention.varlen.varlen_attn` calls, in 2.11 as in 2.13.

The calls for varying lengths are a custom operator, opaque to torch.compile, so compiled code does not depend on the
number of documents or their length. N = B·T tokens; q is (N, H, D), k and v are (N, G, D).
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl
from torch.nn.functional import scaled_dot_product_attention

from anlit.attention.backends.eager import with_gain
from anlit.attention.backends.libraries import reason_against_age, reason_against_precision, reason_against_width
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism
from anlit.attention.mechanisms.alibi import ALiBi
from anlit.attention.mechanisms.sliding_window import SlidingWindow

GROUPED = True
LIBRARY = "flash attention"
WIDEST_HEAD = 256


def _has_package() -> bool:
    """With flash-attn-4 alone there is a folder of this name too, but no file of its own in it, and so no origin."""
    return getattr(importlib.util.find_spec("flash_attn"), "origin", None) is not None


HAS_PACKAGE = _has_package()
"""Checked once at import, because torch 2.11 cannot compile a function that looks it up."""
ALL = -1  # how the libraries write a window without an end

_aten: Any = torch.ops.aten


def reason_against(mechanism: Mechanism, q: Tensor | None = None, dropout: float = 0.0) -> str | None:
    """Why this back end cannot compute `mechanism` for queries like `q`, None if it can."""
    if mechanism.scales_with_distance:
        return "its gain a(t) changes logits by distance, which flash attention cannot"
    inner = without_window(mechanism)
    if inner.shifts_with_distance:
        if type(inner).distance_bias is not ALiBi.distance_bias:
            return "of all biases m(t), flash attention can only compute ALiBi's"
        if not HAS_PACKAGE:
            return "flash attention with ALiBi needs a package: pip install flash-attn --no-build-isolation"
    if dropout:  # activation checkpointing would not restore the random numbers of an opaque operator
        return f"this flash attention has no dropout, and dropout is {dropout:g}"
    if q is None:
        return None
    return (
        reason_against_precision(LIBRARY, q)
        or reason_against_width(LIBRARY, q, WIDEST_HEAD)
        or reason_against_age(LIBRARY, q)
    )


def prepare(mechanism: Mechanism, documents: Documents, n_rows: int) -> None:
    """Copy `cu_seqlens` to the device."""
    documents.packing(n_rows)


def attend(q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float) -> Tensor:
    """softmax(g·S + m) v for q (B, H, T, D), k and v (B, G, T, D)."""
    assert not dropout
    rows, scale = q.shape[0], q.shape[-1] ** -0.5
    window = ALL if mechanism.window is None else mechanism.window - 1
    slopes = _slopes(mechanism, q)
    by_package = HAS_PACKAGE and (slopes is not None or current_flash_attention_impl() is None)
    q = with_gain(q, mechanism, documents)
    if not documents.are_masked and by_package:
        from flash_attn import flash_attn_func

        qkv = (x.transpose(1, 2) for x in (q, k, v))  # (B, T, H, D)
        deterministic = torch.are_deterministic_algorithms_enabled()
        settings = {"window_size": (window, 0 if window != ALL else ALL), "alibi_slopes": slopes}
        out = flash_attn_func(*qkv, softmax_scale=scale, causal=True, deterministic=deterministic, **settings)
        return out.transpose(1, 2)  # type: ignore[no-any-return]
    if not documents.are_masked and window == ALL:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
    bounds, counts = documents.packing(rows)
    qkv = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out, _ = flash_attention(*qkv, bounds, counts, slopes, window, scale, by_package)
    return out.unflatten(0, (rows, -1)).transpose(1, 2)  # type: ignore[no-any-return]


def without_window(mechanism: Mechanism) -> Mechanism:
    """The mechanism inside of a sliding window, or itself."""
    return mechanism.mechanism if isinstance(mechanism, SlidingWindow) else mechanism


def _slopes(mechanism: Mechanism, q: Tensor) -> Tensor | None:
    """ALiBi's slopes (H,), float32: m(t) = −slope·t. None without a bias."""
    m = mechanism.distance_bias(torch.ones(1, device=q.device))
    return None if m is None else -m[:, 0]


@torch.library.custom_op("anlit::flash_attention", mutates_args=())
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    counts: Tensor,
    slopes: Tensor | None,
    window: int,
    scale: float,
    by_package: bool,
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each document: the output (N, H, D) and log-sum-exp (H, N) float32.

    Args:
        q, k, v: (N, H, D), (N, G, D), (N, G, D).
        bounds: See `Packing`.
        counts: See `Packing`.
        slopes: (H,) float32 of m(t) = −slope·t, or None; the package only.
        window: How many keys before its own a query sees; -1 for all.
        scale: 1/√D.
        by_package: Whether flash-attn computes it, or PyTorch.
    """
    q = q.contiguous()  # the output has the memory layout of q
    cu_seqlens, longest = document_bounds(bounds, counts)
    window_sizes = {"window_size_left": window, "window_size_right": 0}
    if by_package:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        out, lse, _, _ = _flash_attn_varlen_forward(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=True,
            **window_sizes,
            softcap=0.0,
            alibi_slopes=slopes,
        )
    else:
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False, scale=scale, **window_sizes
        )
    return out.contiguous(), lse.contiguous()


@torch.library.custom_op("anlit::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor,
    counts: Tensor,
    slopes: Tensor | None,
    window: int,
    scale: float,
    by_package: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from that of the output, (N, H, D)."""
    gradient, q = gradient.contiguous(), q.contiguous()
    cu_seqlens, longest = document_bounds(bounds, counts)
    window_sizes = {"window_size_left": window, "window_size_right": 0}
    if not by_package:
        unused = torch.empty(0, device=q.device)
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # nothing is drawn without dropout
        lengths = (cu_seqlens, cu_seqlens, longest, longest)
        found = _aten._flash_attention_backward(
            gradient, q, k, v, out, lse, *lengths, 0.0, True, rng_state, unused, scale=scale, **window_sizes
        )
        return tuple(x.contiguous() for x in found)  # type: ignore[return-value]
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    _flash_attn_varlen_backward(
        gradient,
        q,
        k,
        v,
        out,
        lse,
        dq,
        dk,
        dv,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        dropout_p=0.0,
        softmax_scale=scale,
        causal=True,
        **window_sizes,
        softcap=0.0,
        alibi_slopes=slopes,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return dq, dk, dv


def document_bounds(bounds: Tensor, counts: Tensor) -> tuple[Tensor, int]:
    """`cu_seqlens` without padding, and the length of the longest document."""
    n_documents, longest = counts.tolist()
    return bounds[: n_documents + 1], longest


def like_output(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Empty results of attention of packed documents: (N, H, D), and the log-sum-exp (H, N) float32."""
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def like_gradients(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Empty gradients of q, k and v."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


flash_attention.register_fake(like_output)
flash_attention_backward.register_fake(like_gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, counts, slopes, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, bounds, counts, slopes)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *flash_attention_backward(gradient, *ctx.saved_tensors, *ctx.settings), *[None] * 6


flash_attention.register_autograd(_differentiate, setup_context=_save)
