"""The arguments for PyTorch's flash attention, with a slow kernel on the CPU under its operator."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from anlit import GPT
from anlit.data.batch import Batch, batch_from_blocks
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
    n_heads_per_key = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(n_heads_per_key, 1)
    v = v.repeat_interleave(n_heads_per_key, 1)
    lengths = cu_seqlens.diff()
    begins = cu_seqlens[:-1].repeat_interleave(lengths)
    index = torch.arange(len(q))
    t = index[:, None] - index
    left, right = [longest if size < 0 else size for size in window]
    is_outside = (t > left) | (t < -right)
    is_hidden = is_outside | (begins[:, None] != begins)
    scale = q.shape[-1] ** -0.5
    logits = scale * torch.einsum("ihd,jhd->hij", q, k)
    logits = logits.masked_fill(is_hidden, float("-inf"))
    weights = logits.softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v)


def _varlen_forward(
    q,
    k,
    v,
    cu_q,
    cu_k,
    max_q,
    max_k,
    is_causal,
    scale,
    window,
    enable_gqa=False,
    *_,
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
    gradient,
    q,
    k,
    v,
    out,
    lse,
    cu_q,
    cu_k,
    max_q,
    max_k,
    causal,
    rng,
    scale,
    window,
):
    def compute_gradients() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        output = by_document(*leaves, cu_q, max_q, window)
        return torch.autograd.grad(output, leaves, gradient)

    # Autograd is off inside an operator, but not in another thread.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(compute_gradients).result()


def example_batch() -> Batch:
    """Two rows of 16 tokens; token 0 ends a document."""
    blocks = random_tokens(2, 17, vocab_size=4)
    return batch_from_blocks(blocks, end_of_document=0)


varlen._varlen_attn.register_kernel("cpu", _varlen_forward)
varlen._varlen_attn_backward.register_kernel("cpu", _varlen_backward)


WITHOUT_PACKAGE = [name for name in FLASH if "alibi" not in name]


@pytest.mark.parametrize("n_kv_heads", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "documents"])
@pytest.mark.parametrize("name", WITHOUT_PACKAGE)
def test_pytorch_gets_arguments_for_what_eager_computes(name, kind, n_kv_heads) -> None:
    """ALiBi's slopes go to the package flash-attn, on a GPU alone: test_gpu.py."""
    mechanism = copy.deepcopy(MECHANISMS[name]).for_layer(2, 16, 0).double()
    tensors = inputs(3, 2, LENGTH, 16, dtype=torch.float64, n_heads_kv=n_kv_heads)
    documents = packed(3, LENGTH, kind)

    result = gradients(flash.attend, mechanism, tensors, documents)

    expected = gradients(eager.attend, mechanism, tensors, documents)
    assert_same(result, expected)


@pytest.mark.parametrize("masking", [True, False])
def test_a_batch_tells_where_documents_begin_without_asking_the_device(
    masking, monkeypatch
) -> None:
    monkeypatch.setattr(flash, "unsupported_reason", lambda mechanism, q=None: None)
    monkeypatch.setattr(torch.Tensor, "nonzero", None)
    batch = example_batch()
    model = tiny(GPT, kernel="flash", document_masking=masking)

    logits = model(batch.tokens, batch.document_ids, batch.cu_seqlens, batch.longest)

    assert logits.isfinite().all()


def test_the_packing_of_a_batch_is_the_documents_or_the_rows() -> None:
    batch = example_batch()
    device = torch.device("cpu")
    masked = Documents(batch.document_ids, 16, device, batch.cu_seqlens, batch.longest)
    unmasked = Documents(None, 16, device, batch.cu_seqlens, batch.longest)

    document_starts, longest = masked.packing(2)
    row_starts, row_length = unmasked.packing(2)

    assert torch.equal(document_starts, batch.cu_seqlens)
    assert len(longest) == batch.longest
    assert row_starts.tolist() == [0, 16, 32]
    assert len(row_length) == 16
