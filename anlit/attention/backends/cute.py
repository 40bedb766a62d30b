"""FlashAttention-4, the package flash-attn-4 (`flash_attn.cute`): fast attention on Hopper and Blackwell.

Its kernels let a function change each score S, in the forward pass and, by its derivative, in the backward pass:

    scale-invariant    a·(S − (c/2)·a)    for m = (c/2)·(1 − a²), up to the constant c/2: one table over distance
    a bias             S + m              one table
    both               a·S + m            two

Tables are float32 by distance, (H or 1, T + PADDING). Learned ones are refused: the kernels give no gradient for them.
Documents are sequences of varying length. The kernels are compiled on first use, for each form, width and precision.

No GPU has run this. It was written for flash-attn-4 4.0.0b36, which compiles both directions of it for Hopper without a
GPU. It calls the functions below the public ones: they take and give log-sum-exps, so that attention is one operator
that torch.compile does not look into.
"""

import hashlib
import importlib.util
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anlit.attention.backends.eager import distance_tables, tables_are_learned, with_gain
from anlit.attention.backends.flash import document_bounds, like_gradients, like_output, without_window
from anlit.attention.backends.libraries import reason_against_precision, reason_against_width
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism
from anlit.attention.mechanisms.scale_invariant import ScaleInvariant

GROUPED = True
LIBRARY = "FlashAttention-4"
PADDING = 512
"""How far past the last distance the kernels may look up: more than the queries of a block."""
WIDEST_HEAD = {9: 256, 10: 128}
"""By the major compute capability: Hopper, Blackwell."""


def _is_installed() -> bool:
    """Without importing the package flash_attn, of which it is a part, next to flash-attn 2 if that is installed."""
    found = importlib.util.find_spec("flash_attn")
    places = found.submodule_search_locations if found is not None else None
    return any((Path(place) / "cute" / "interface.py").is_file() for place in places or ())


IS_INSTALLED = _is_installed()
"""Checked once at import, because torch 2.11 cannot compile a function that looks it up."""


def reason_against(mechanism: Mechanism, q: Tensor | None = None, dropout: float = 0.0) -> str | None:
    """Why this back end cannot compute `mechanism` for queries like `q`, None if it can."""
    if not IS_INSTALLED:
        return "flash-attn-4 is not installed (make extras EXTRAS=cute)"
    if tables_are_learned(mechanism):
        return f"its a(t) or m(t) is learned, and {LIBRARY} gives no gradient for it"
    if dropout:
        return f"{LIBRARY} has no dropout, and dropout is {dropout:g}"
    if q is None:
        return None
    if (reason := reason_against_precision(LIBRARY, q, needs_nvidia=True)) is not None:
        return reason
    generation, _ = torch.cuda.get_device_capability(q.device)
    if generation not in WIDEST_HEAD:
        return f"{LIBRARY} changes scores on Hopper and Blackwell GPUs (compute capability 9.x or 10.x) only"
    return reason_against_width(LIBRARY, q, WIDEST_HEAD[generation])


def prepare(mechanism: Mechanism, documents: Documents, n_rows: int) -> None:
    """Copy `cu_seqlens` to the device."""
    documents.packing(n_rows)


def attend(q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float) -> Tensor:
    """softmax(a·g·S + m) v for q (B, H, T, D), k and v (B, G, T, D)."""
    assert not dropout
    rows, length, width = q.shape[0], *q.shape[-2:]
    form, half_c, tables = _form(mechanism, length, q)
    q = with_gain(q, mechanism, documents)
    bounds, counts = documents.packing(rows)
    qkv = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    window = None if mechanism.window is None else mechanism.window - 1
    out, _ = cute_attention(*qkv, tables, bounds, counts, form, half_c, window, width**-0.5)
    return out.unflatten(0, (rows, -1)).transpose(1, 2)  # type: ignore[no-any-return]


def _form(mechanism: Mechanism, length: int, like: Tensor) -> tuple[str, float, list[Tensor]]:
    """The name of the function of the scores, in `changed` and `derivative`, its constant and its tables."""
    a, m = (None if table is None else table.float() for table in distance_tables(mechanism, length + PADDING, like))
    inner = without_window(mechanism)
    if type(inner) is ScaleInvariant:
        return "scale-invariant", inner.c / 2, [_by_head(a)]
    if a is None:
        return ("plain", 0.0, []) if m is None else ("bias", 0.0, [_by_head(m)])
    return "both", 0.0, [_by_head(a), _by_head(torch.zeros_like(a) if m is None else m)]


def _by_head(table: Tensor | None) -> Tensor:
    assert table is not None
    return table.reshape(-1, table.shape[-1]).contiguous()


def changed(form: str, half_c: float, score: Any, tables: list[Any]) -> Any:
    """The logit of `score`, up to a constant; `tables` at its distance, of a or m or both as `_form` orders them."""
    if form == "scale-invariant":
        return tables[0] * (score - tables[0] * half_c)
    return score + tables[0] if form == "bias" else score * tables[0] + tables[1]


def derivative(form: str, gradient: Any, tables: list[Any]) -> Any:
    """The gradient of the score from that of the logit."""
    return gradient if form == "bias" else gradient * tables[0]


@lru_cache
def functions(form: str, half_c: float, per_head: bool) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """`score_mod` and `score_mod_bwd` for the kernels, which call them for one score at a time if they have tables.

    `q_idx` and `kv_idx` count from the beginning of the document. A key ahead is masked, but may be looked up.
    """
    if form == "plain":
        return None, None
    import cutlass
    from cutlass import cute
    from flash_attn.cute.utils import scalar_to_ssa

    def look_up(aux_tensors: Any, h_idx: Any, q_idx: Any, kv_idx: Any) -> list[Any]:
        t = q_idx - kv_idx
        t = cute.where(t < cute.full_like(t, 0), cute.full_like(t, 0), t)
        h = h_idx[0] if per_head else 0
        return [scalar_to_ssa(table[h, t[0]], cutlass.Float32) for table in aux_tensors]

    @cute.jit
    def score_mod(score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        return changed(form, half_c, score, look_up(aux_tensors, h_idx, q_idx, kv_idx))

    @cute.jit
    def score_mod_bwd(grad, score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        return derivative(form, grad, look_up(aux_tensors, h_idx, q_idx, kv_idx))

    # The library keeps compiled kernels by a hash of a function's text and the `repr` of what it encloses. The latter
    # would be an address for look_up, and nothing of what it does.
    text = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    for function in (score_mod, score_mod_bwd):
        own = f"{text} {function.__name__} {form} {half_c!r} {per_head}"
        getattr(function, "__wrapped__", function).__cute_hash__ = own
    return score_mod, score_mod_bwd


@torch.library.custom_op("anlit::cute_attention", mutates_args=())
def cute_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: list[Tensor],
    bounds: Tensor,
    counts: Tensor,
    form: str,
    half_c: float,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each document: the output (N, H, D) and log-sum-exp (H, N) float32.

    Args:
        q, k, v: (N, H, D) and (N, G, D) twice.
        tables: Of `form`, each (H or 1, T + PADDING) float32.
        bounds: See `Packing`.
        counts: See `Packing`.
        form: See `changed`.
        half_c: c/2 of the form scale-invariant.
        window: How many keys before its own a query sees; None for all.
        scale: 1/√D.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    shared = _shared(tables, bounds, counts, window)
    score_mod, _ = functions(form, half_c, _per_head(tables))
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse, *_ = _flash_attn_fwd(q, k, v, softmax_scale=scale, score_mod=score_mod, return_lse=True, **shared)
    return out, lse


@torch.library.custom_op("anlit::cute_attention_backward", mutates_args=())
def cute_attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tables: list[Tensor],
    bounds: Tensor,
    counts: Tensor,
    form: str,
    half_c: float,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from that of the output, in their shapes."""
    from flash_attn.cute.interface import _flash_attn_bwd

    shared = _shared(tables, bounds, counts, window)
    score_mod, score_mod_bwd = functions(form, half_c, _per_head(tables))
    q, k, v, gradient = (x.contiguous() for x in (q, k, v, gradient))
    dq, dk, dv = _flash_attn_bwd(
        q,
        k,
        v,
        out,
        gradient,
        lse,
        softmax_scale=scale,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        **shared,
    )
    return dq, dk, dv


def _shared(tables: list[Tensor], bounds: Tensor, counts: Tensor, window: int | None) -> dict[str, Any]:
    """The arguments that both directions have in common."""
    cu_seqlens, longest = document_bounds(bounds, counts)
    lengths = {f"cu_seqlens_{x}": cu_seqlens for x in "qk"} | {f"max_seqlen_{x}": longest for x in "qk"}
    return {"causal": True, "window_size_left": window, "aux_tensors": tables or None, **lengths}


def _per_head(tables: list[Tensor]) -> bool:
    return any(len(table) > 1 for table in tables)


cute_attention.register_fake(like_output)
cute_attention_backward.register_fake(like_gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, tables, bounds, counts, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, bounds, counts, *tables)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, bounds, counts, *tables = ctx.saved_tensors
    found = cute_attention_backward(gradient, q, k, v, out, lse, tables, bounds, counts, *ctx.settings)
    return *found, [None] * len(tables), *[None] * 6


cute_attention.register_autograd(_differentiate, setup_context=_save)
