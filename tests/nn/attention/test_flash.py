"""What PyTorch's flash attention is asked for, with a slow kernel on the CPU under its operator."""

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
    """Causal attention of each sequence, (N, H, D), as PyTorch's documentation has it."""
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.diff().max() <= longest
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    begins, index = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff()), torch.arange(len(q))
    t = index[:, None] - index
    before, after = (limit if limit >= 0 else longest for limit in window)
    hidden = (t > before) | (t < -after) | (begins[:, None] != begins)
    logits = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hij,jhd->ihd", logits.masked_fill(hidden, float("-inf")).softmax(-1), v)


def _varlen_forward(
    q, k, v, cu_q, cu_k, max_q, max_k, is_causal, scale, window, enable_gqa=False, *rest
):
    assert scale in (None, q.shape[-1] ** -0.5)
    assert torch.equal(cu_q, cu_k)
    assert is_causal == (tuple(window) == (-1, 0))
    assert enable_gqa or q.shape[1] == k.shape[1]
    out = by_document(q, k, v, cu_q, max_q, window)
    return (
        out,
        q.new_zeros(q.shape[1], len(q), dtype=torch.float32),
        torch.zeros(2, dtype=torch.uint64),
    )


def _varlen_backward(
    gradient, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, rng, scale, window
):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with ThreadPoolExecutor(
        1
    ) as pool:  # inside of an operator autograd is off, but not in another thread
        out = pool.submit(by_document, *leaves, cu_q, max_q, window).result()
        return pool.submit(torch.autograd.grad, out, leaves, gradient).result()


varlen._varlen_attn.register_kernel("cpu", _varlen_forward)
varlen._varlen_attn_backward.register_kernel("cpu", _varlen_backward)


@pytest.mark.parametrize("n_kv_heads", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "documents"])
@pytest.mark.parametrize("name", [name for name in FLASH if "alibi" not in name])
def test_pytorch_is_asked_for_what_eager_computes(name, kind, n_kv_heads) -> None:
    """ALiBi's slopes go to the package flash-attn, on a GPU alone: test_gpu.py."""
    mechanism = copy.deepcopy(MECHANISMS[name]).for_layer(2, 16, 0).double()
    tensors = inputs(3, 2, LENGTH, 16, dtype=torch.float64, n_heads_kv=n_kv_heads)
    attends = (flash.attend, eager.attend)
    assert_same(
        *(gradients(attend, mechanism, tensors, packed(3, LENGTH, kind)) for attend in attends)
    )


def test_a_batch_tells_where_documents_begin_without_asking_the_device(monkeypatch) -> None:
    monkeypatch.setattr(flash, "unsupported_reason", lambda mechanism, q=None: None)
    monkeypatch.setattr(torch.Tensor, "nonzero", None)
    batch = batch_from_blocks(random_tokens(2, 17, vocab_size=4), end_of_document=0)
    for masking in (True, False):
        model = tiny(GPT, kernel="flash", document_masking=masking)
        assert (
            model(batch.tokens, batch.document_ids, batch.cu_seqlens, batch.longest)
            .isfinite()
            .all()
        )
    starts, longest = batch.cu_seqlens, batch.longest
    for ids, expected in (
        (batch.document_ids, (starts.tolist(), longest)),
        (None, ([0, 16, 32], 16)),
    ):
        cu_seqlens, size = Documents(ids, 16, torch.device("cpu"), starts, longest).packing(2)
        assert (cu_seqlens.tolist(), len(size)) == expected
