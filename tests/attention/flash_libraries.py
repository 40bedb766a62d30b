"""Stand-ins for the two libraries behind `flash`: their signatures, shapes and types, computed in float64.

The signatures are flash-attn 2.8's and, by the operator's own schema, those of the installed PyTorch.
"""

import importlib.machinery
import math
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from anlit.attention.backends import flash


class Calls(list[str]):
    """Which functions were called, in order."""


def logits_of(q: Tensor, k: Tensor, scale: float, left: int, slopes: Tensor | None) -> Tensor:
    """(H, T, T) of one document, (T, H, D)."""
    index = torch.arange(len(q))
    t = index[:, None] - index
    logits = torch.einsum("ihd,jhd->hij", q.double(), k.double()) * scale
    if slopes is not None:
        logits = logits - slopes.double()[:, None, None] * t
    return logits.masked_fill((t < 0) | (t > (left if left >= 0 else len(q))), -math.inf)


def reference(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """Causal attention of one document, (T, H, D), and ln Σ e^L, (H, T); k and v may be (T, G, D)."""
    k, v = (for_every_head(x, q) for x in (k, v))
    logits = logits_of(q, k, *settings)
    return torch.einsum("hij,jhd->ihd", logits.softmax(-1), v.double()).to(q.dtype), logits.logsumexp(-1)


def gradients(
    gradient: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, *settings: Any
) -> tuple[Tensor, ...]:
    """Of q, k, v of one document, by hand: nothing is recorded inside an operator."""
    n_groups = k.shape[1]
    gradient, out, lse, q, k, v = (x.double() for x in (gradient, out, lse, q, k, v))
    k, v = (for_every_head(x, q) for x in (k, v))
    weights = (logits_of(q, k, scale, *settings) - lse[..., None]).exp()
    of_weights = torch.einsum("ihd,jhd->hij", gradient, v)
    of_logits = weights * (of_weights - (gradient * out).sum(-1).T[..., None])
    dq, dk = torch.einsum("hij,jhd->ihd", of_logits, k), torch.einsum("hij,ihd->jhd", of_logits, q)
    dv = torch.einsum("hij,ihd->jhd", weights, gradient)
    dk, dv = (x.unflatten(1, (n_groups, -1)).sum(2) for x in (scale * dk, dv))
    return scale * dq, dk, dv


def for_every_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values (T, G, D) → (T, H, D), as the kernels read them."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def check(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, slopes: Tensor | None) -> list[int]:
    """What both libraries ask of their arguments; gives the documents' lengths."""
    N, H, D = q.shape
    assert k.shape == v.shape == (N, k.shape[1], D)
    assert H % k.shape[1] == 0
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert cu.dtype == torch.int32
    assert cu[0] == 0
    assert cu[-1] == N
    lengths = cu.diff()
    assert (lengths > 0).all()
    assert lengths.max() <= longest
    assert slopes is None or (slopes.shape == (H,) and slopes.dtype == torch.float32)
    return lengths.tolist()


def by_document(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float, left: int, slopes: Tensor | None
) -> tuple[Tensor, Tensor]:
    lengths = check(q, k, v, cu, longest, slopes)
    parts = [reference(*own, scale, left, slopes) for own in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1).float()


def gradients_by_document(
    gradient: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor,
    cu: Tensor, longest: int, scale: float, left: int, slopes: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    lengths = check(q, k, v, cu, longest, slopes)
    assert gradient.shape == out.shape == q.shape
    split = zip(*(x.split(lengths) for x in (gradient, out)), lse.split(lengths, 1),
                *(x.split(lengths) for x in (q, k, v)), strict=True)  # fmt: skip
    parts = [gradients(*own, scale, left, slopes) for own in split]
    return [torch.cat(of_one).to(q.dtype) for of_one in zip(*parts, strict=True)]


def pretend_package(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A package flash_attn like 2.8's."""
    calls = Calls()
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)

    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ) -> Tensor:  # fmt: skip
        calls.append("dense")
        assert causal
        assert window_size in ((-1, -1), (window_size[0], 0))
        rows = [reference(*row, softmax_scale, window_size[0], alibi_slopes)[0] for row in zip(q, k, v, strict=True)]
        return torch.stack(rows)

    def forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        calls.append("forward")
        assert cu_seqlens_q is cu_seqlens_k
        assert max_seqlen_q == max_seqlen_k
        assert causal
        assert window_size_right == 0
        found = by_document(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size_left, alibi_slopes)
        return *found, torch.empty(0), torch.empty(2, dtype=torch.int64)

    def backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ) -> Tensor:  # fmt: skip
        calls.append("backward")
        settings = (cu_seqlens_q, max_seqlen_q, softmax_scale, window_size_left, alibi_slopes)
        for into, value in zip(
            (dq, dk, dv), gradients_by_document(dout, out, softmax_lse, q, k, v, *settings), strict=True
        ):
            into.copy_(value)
        return torch.empty(0)

    package.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    interface._flash_attn_varlen_forward = forward  # type: ignore[attr-defined]
    interface._flash_attn_varlen_backward = backward  # type: ignore[attr-defined]
    monkeypatch.setattr(flash, "HAS_PACKAGE", True)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    return calls


def pretend_pytorch(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """PyTorch's operators, which have no kernel for the CPU."""
    calls = Calls()
    monkeypatch.setattr(flash, "HAS_PACKAGE", False)

    def named(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
        schema = operator.default._schema.arguments
        positional = [argument.name for argument in schema if not argument.kwarg_only]
        assert len(arguments) == len(positional)
        assert keywords.keys() <= {argument.name for argument in schema if argument.kwarg_only}
        return dict(zip(positional, arguments, strict=True)) | keywords

    def settings(given: dict[str, Any]) -> tuple[Any, ...]:
        assert given["cum_seq_q"] is given["cum_seq_k"]
        assert given["max_q"] == given["max_k"]
        assert given["is_causal"]
        assert given["dropout_p"] == 0
        assert given["window_size_right"] == 0
        return given["cum_seq_q"], given["max_q"], given["scale"], given["window_size_left"], None

    def forward(*arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        calls.append("forward")
        given = named(torch.ops.aten._flash_attention_forward, arguments, keywords)
        found = by_document(given["query"], given["key"], given["value"], *settings(given))
        return *found, torch.empty(2), torch.empty(0), torch.empty(0)

    def backward(*arguments: Any, **keywords: Any) -> Any:
        calls.append("backward")
        given = named(torch.ops.aten._flash_attention_backward, arguments, keywords)
        names = ("grad_out", "out", "logsumexp", "query", "key", "value")
        return gradients_by_document(*(given[name] for name in names), *settings(given))

    operators = types.SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)
    monkeypatch.setattr(flash, "_aten", operators)
    return calls
