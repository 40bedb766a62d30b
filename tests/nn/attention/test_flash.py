"""The arguments for PyTorch's flash attention, with a slow kernel on the CPU under its operator."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from anlit import GPT
from anlit.data.batch import batch_from_blocks
from anlit.nn.kernels import eager, flash
from anlit.nn.kernels.documents import Documents
from tests.nn.attention.kernels import FLASH, MECHANISMS, assert_same, gradients, inputs, packed
from tests.nn.models.tiny import random_tokens, tiny

LENGTH = 13


def by_document(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, window: Any
) -> Tensor:
    """Causal attention of each sequence, (N, H, D), as PyTorch's documentation describes it."""
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.diff().max() <= longest
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    begins = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    index = torch.arange(len(q))
    t = index[:, None] - index
    left, right = (limit if limit >= 0 else longest for limit in window)
    is_hidden = (t > left) | (t < -right) | (begins[:, None] != begins)
    logits = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    weights = logits.masked_fill(is_hidden, float("-inf")).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v)


def _varlen_forward(
    q, k, v, cu_q, cu_k, max_q, max_k, is_causal, scale, window, enable_gqa=False, *_
):
    assert scale in (None, q.shape[-1] ** -0.5)
    assert torch.equal(cu_q, cu_k)
    assert is_causal == (tuple(window) == (-1, 0))
    assert enable_gqa or q.shape[1] == k.shape[1]
    out = by_document(q, k, v, cu_q, max_q, window)
    lse = q.new_zeros(q.shape[1], len(q), dtype=torch.float32)
    random_state = torch.zeros(2, dtype=torch.uint64)
    return out, lse, random_state


def _varlen_backward(
    gradient, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, rng, scale, window
):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    # Autograd is off inside an operator, but not in another thread.
    with ThreadPoolExecutor(1) as pool:
        out = pool.submit(by_document, *leaves, cu_q, max_q, window).result()
        return pool.submit(torch.autograd.grad, out, leaves, gradient).result()


varlen._varlen_attn.register_kernel("cpu", _varlen_forward)
varlen._varlen_attn_backward.register_kernel("cpu", _varlen_backward)


@pytest.mark.parametrize("n_kv_heads", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "documents"])
@pytest.mark.parametrize("name", [name for name in FLASH if "alibi" not in name])
def test_pytorch_gets_arguments_for_what_eager_computes(name, kind, n_kv_heads) -> None:
    """ALiBi's slopes go to the package flash-attn, on a GPU alone: test_gpu.py."""
    mechanism = copy.deepcopy(MECHANISMS[name]).for_layer(2, 16, 0).double()
    tensors = inputs(3, 2, LENGTH, 16, dtype=torch.float64, n_heads_kv=n_kv_heads)

    result = gradients(flash.attend, mechanism, tensors, packed(3, LENGTH, kind))
    expected = gradients(eager.attend, mechanism, tensors, packed(3, LENGTH, kind))

    assert_same(result, expected)


def test_a_batch_tells_where_documents_begin_without_asking_the_device(monkeypatch) -> None:
    monkeypatch.setattr(flash, "unsupported_reason", lambda mechanism, q=None: None)
    monkeypatch.setattr(torch.Tensor, "nonzero", None)
    batch = batch_from_blocks(random_tokens(2, 17, vocab_size=4), end_of_document=0)
    for masking in (True, False):
        model = tiny(GPT, kernel="flash", document_masking=masking)
        logits = model(batch.tokens, batch.document_ids, batch.cu_seqlens, batch.longest)
        assert logits.isfinite().all()


def test_the_packing_of_a_batch_is_the_documents_or_the_rows() -> None:
    batch = batch_from_blocks(random_tokens(2, 17, vocab_size=4), end_of_document=0)
    device = torch.device("cpu")

    masked = Documents(batch.document_ids, 16, device, batch.cu_seqlens, batch.longest)
    cu_seqlens, size = masked.packing(2)
    assert cu_seqlens.tolist() == batch.cu_seqlens.tolist()
    assert len(size) == batch.longest

    unmasked = Documents(None, 16, device, batch.cu_seqlens, batch.longest)
    cu_seqlens, size = unmasked.packing(2)
    assert cu_seqlens.tolist() == [0, 16, 32]
    assert len(size) == 16
