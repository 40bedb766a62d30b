"""The arguments for PyTorch's flash attention, with a slow kernel on the CPU under its operator."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, varlen

from anlit import GPT, Plain
from anlit.data.batch import Batch, batch_from_blocks
from anlit.errors import UserError
from anlit.nn import kernels
from anlit.nn.attention.attention import attention_layers, kernels_in_use
from anlit.nn.kernels import eager, flash, flex, launch_limits, sdpa
from anlit.nn.kernels.documents import Documents
from tests.nn.attention.kernels import FLASH, MECHANISMS, assert_same, gradients, inputs, packed
from tests.nn.models.tiny import random_tokens, tiny

LENGTH = 13
Q = torch.zeros(1, 2, 16, 16, requires_grad=True)
"""Queries like those of the example batch in `tiny` models."""


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


def test_more_documents_than_a_launch_can_have_are_refused_with_a_way_out(monkeypatch) -> None:
    monkeypatch.setattr(flash, "unsupported_reason", lambda mechanism, q=None: None)
    batch = example_batch()
    n_documents = len(batch.cu_seqlens) - 1
    model = tiny(GPT, kernel="flash")
    arguments = (batch.tokens, batch.document_ids, batch.cu_seqlens, batch.longest)
    monkeypatch.setattr(launch_limits, "MOST_SEQUENCES", n_documents)
    model(*arguments)
    monkeypatch.setattr(launch_limits, "MOST_SEQUENCES", n_documents - 1)

    limit = f"at most {n_documents - 1} documents or rows, not {n_documents}"
    with pytest.raises(UserError, match=f"'flash' .*{limit}; set model.kernel=auto, or a smaller"):
        model(*arguments)


def test_a_batch_too_large_for_the_gradient_of_flash_is_evaluated_by_it(monkeypatch) -> None:
    monkeypatch.setattr(flash, "unsupported_reason", lambda mechanism, q=None: None)
    monkeypatch.setattr(launch_limits, "LARGEST_GRADIENT", 1)
    batch = example_batch()
    model = tiny(GPT, kernel="flash")
    arguments = (batch.tokens, batch.document_ids, batch.cu_seqlens, batch.longest)

    with torch.no_grad():
        logits = model(*arguments)

    assert torch.isfinite(logits).all()
    model.model.embedding.requires_grad_(False)
    with pytest.raises(UserError, match="'flash' cannot compute this batch: it computes at most"):
        model(*arguments)


def test_auto_takes_another_kernel_for_a_batch_with_more_documents_than_flash_can_have(
    monkeypatch,
) -> None:
    monkeypatch.setattr(flash, "unsupported_reason", lambda mechanism, q=None: None)
    monkeypatch.setattr(kernels, "_cpu_kernels", lambda *_: ("flash", "eager"))
    batch = example_batch()
    n_documents = len(batch.cu_seqlens) - 1
    monkeypatch.setattr(launch_limits, "MOST_SEQUENCES", n_documents - 1)
    model = tiny(GPT)
    packed_batch = (batch.tokens, batch.document_ids, batch.cu_seqlens, batch.longest)
    one_document = (batch.tokens, torch.zeros_like(batch.document_ids))

    logits = model(*packed_batch)
    kernels_for_many = [layer.kernel_for(Q, is_packed=True) for layer in attention_layers(model)]
    model(*one_document)
    kernels_for_few = [layer.kernel_for(Q, is_packed=True) for layer in attention_layers(model)]

    expected = tiny(GPT, kernel="eager")(*packed_batch)
    torch.testing.assert_close(logits, expected)
    assert kernels_for_many == ["eager", "eager"]
    assert kernels_for_few == ["flash", "flash"]
    names = [record["kernel"] for record in kernels_in_use(attention_layers(model))]
    assert names == ["flash", "eager"]


@pytest.mark.parametrize(
    ("n_sequences", "length", "n_heads", "d_head", "is_possible"),
    [
        # Wrong addresses on a GPU: flash-attention PR 2260, TabPFN PR 1184
        (8300, 1, 16, 128, False),
        (400, 10_496, 4, 128, False),
        (8000, 1, 16, 128, True),
        (390, 10_496, 4, 128, True),
        (65_535, 8, 4, 16, True),
        (65_536, 8, 4, 16, False),
        (65_535, 128, 4, 40, False),  # heads of 40 are padded to 64
    ],
)
def test_flash_attention_is_not_asked_for_gradients_that_it_cannot_address(
    n_sequences, length, n_heads, d_head, is_possible, monkeypatch
) -> None:
    n_tokens = n_sequences * length
    monkeypatch.setattr(sdpa, "gpu_generation", lambda: 8)
    with FakeTensorMode():
        shape = (n_sequences, n_heads, length, d_head)
        q = torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    order = sdpa.order_of_kernels(q, None)
    reason = launch_limits.too_large_for_flash(n_sequences, n_tokens, n_heads, d_head, True)

    if is_possible:
        assert reason is None
        assert order is None
    else:
        assert "it computes at most" in reason
        assert order == [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


LEARNED_BIAS = MECHANISMS["a user's"].for_layer(2, 8, 0)


@pytest.mark.parametrize(
    ("kernel", "mechanism", "trains", "dropout", "is_possible"),
    [
        (flex, Plain(), True, 0.0, False),
        (sdpa, Plain(), True, 0.0, True),
        # PyTorch's test_mem_eff_attention_fail_with_batch_size_geq_65536_error
        (sdpa, Plain(), True, 0.1, False),
        (sdpa, LEARNED_BIAS, True, 0.0, False),
        (sdpa, LEARNED_BIAS, False, 0.0, True),
    ],
)
def test_more_rows_than_a_launch_on_a_gpu_can_have_are_a_reason(
    kernel, mechanism, trains, dropout, is_possible
) -> None:
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, 8, device="cuda", requires_grad=trains)
    documents = Documents(None, 8, torch.device("cpu"))

    with torch.no_grad():  # as in `Attention.prepare`
        most = kernel.batch_limit(mechanism, q, documents, 65_535, dropout)
        reason = kernel.batch_limit(mechanism, q, documents, 65_536, dropout)

    assert most is None
    if is_possible:
        assert reason is None
    else:
        assert "at most 65,535 documents or rows, not 65,536" in reason
