"""What flash attention's libraries are asked for, with a slow kernel on the CPU in place of theirs."""

import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from anlit import GPT
from anlit.attention.backends import eager, flash
from anlit.attention.documents import Documents
from anlit.data.batch import batch_from_blocks
from tests.attention.kernels import FLASH, MECHANISMS, assert_compiled_once, assert_same, gradients, inputs, packed
from tests.models.tiny import random_tokens, tiny

LENGTH = 13


def by_document(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, window: Any, slopes: Any) -> Tensor:
    """Causal attention of each sequence, (N, H, D), as flash-attn's documentation has it."""
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.diff().max() <= longest
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    parts = []
    for begin, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
        t = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        logits = torch.einsum("ihd,jhd->hij", q[begin:end], k[begin:end]) * q.shape[-1] ** -0.5
        logits = logits if slopes is None else logits - slopes[:, None, None] * t.abs()
        before, after = (limit if limit >= 0 else len(t) for limit in window)
        hidden = (t > before) | (t < -after)
        weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hij,jhd->ihd", weights, v[begin:end]))
    return torch.cat(parts)


def _varlen_forward(q, k, v, cu_q, cu_k, max_q, max_k, is_causal, scale, window, enable_gqa=False, *rest):
    assert scale is None or scale == q.shape[-1] ** -0.5
    assert torch.equal(cu_q, cu_k)
    assert is_causal == (tuple(window) == (-1, 0))
    assert enable_gqa or q.shape[1] == k.shape[1]
    out = by_document(q, k, v, cu_q, max_q, window, None)
    return out, q.new_zeros(q.shape[1], len(q), dtype=torch.float32), torch.zeros(2, dtype=torch.uint64)


def _varlen_backward(gradient, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, rng, scale, window):
    def differentiate() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(by_document(*leaves, cu_q, max_q, window, None), leaves, gradient)

    with ThreadPoolExecutor(1) as pool:  # inside of an operator autograd is off, but not in another thread
        return pool.submit(differentiate).result()


varlen._varlen_attn.register_kernel("cpu", _varlen_forward)
varlen._varlen_attn_backward.register_kernel("cpu", _varlen_backward)


def flash_attn_varlen_func(
    q, k, v, cu_q, cu_k, max_q, max_k, *, causal, window_size, alibi_slopes, deterministic
) -> Tensor:
    """That of flash-attn 2, which ALiBi takes."""
    assert causal
    assert alibi_slopes.dtype == torch.float32
    return by_document(q, k, v, cu_q, max_q, window_size, alibi_slopes)


@pytest.mark.parametrize("n_kv_heads", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "documents"])
@pytest.mark.parametrize("name", FLASH)
def test_the_libraries_are_asked_for_what_eager_computes(name, kind, n_kv_heads, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))  # type: ignore[arg-type]
    mechanism = MECHANISMS[name].for_layer(2, 16, 0).double()
    tensors = inputs(3, 2, LENGTH, 16, dtype=torch.float64, n_heads_kv=n_kv_heads)
    result, expected = (
        gradients(backend.attend, mechanism, tensors, packed(3, LENGTH, kind)) for backend in (flash, eager)
    )
    assert_same(result, expected, 1e-5 if "alibi" in name else 1e-9)  # slopes are float32


def test_changing_documents_do_not_compile_anything_again(monkeypatch) -> None:
    monkeypatch.setattr(flash, "unsupported_reason", lambda mechanism, q=None, dropout=0.0: None)
    assert_compiled_once(tiny(GPT, backend="flash"), tiny(GPT, backend="eager"))


def test_a_batch_tells_where_documents_begin_without_asking_the_device(monkeypatch) -> None:
    monkeypatch.setattr(flash, "unsupported_reason", lambda mechanism, q=None, dropout=0.0: None)
    monkeypatch.setattr(torch.Tensor, "nonzero", None)
    batch = batch_from_blocks(random_tokens(2, 17, vocab_size=4), end_of_document=0)
    for masking in (True, False):
        logits = tiny(GPT, backend="flash", document_masking=masking).logits_of(batch)
        assert logits.isfinite().all()
    starts, longest = batch.cu_seqlens, batch.longest
    for ids, expected in ((batch.document_ids, (starts.tolist(), longest)), (None, ([0, 16, 32], 16))):
        packing = Documents(ids, 16, torch.device("cpu"), starts, longest).packing(2)
        assert (packing.cu_seqlens.tolist(), len(packing.longest)) == expected
