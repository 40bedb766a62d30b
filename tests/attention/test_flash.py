"""Flash attention with a slow kernel on the CPU in place of the libraries' own, and on a GPU with the real ones."""

import sys
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from anlit import GPT, ALiBi, LogN, Plain, SlidingWindow
from anlit.attention.backends import eager, flash
from anlit.attention.documents import Documents
from anlit.data.batch import batch_from_blocks
from tests.attention import perfect
from tests.attention.kernels import assert_compiled_once, assert_same, check_mechanism, gradients, inputs, packed
from tests.models.tiny import random_tokens, tiny

MECHANISMS = {
    "plain": Plain(),
    "log n": LogN(),
    "window": SlidingWindow(4),
    "window of one": SlidingWindow(1),
    "window, log n": SlidingWindow(5, LogN()),
    "alibi": ALiBi(),
    "window, alibi": SlidingWindow(6, ALiBi()),
}
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


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash_attn 2, of which ALiBi takes one function."""

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> Tensor:  # fmt: skip
        assert causal
        assert alibi_slopes.dtype == torch.float32
        return by_document(q, k, v, cu_seqlens_q, max_seqlen_q, window_size, alibi_slopes)

    module = types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", module)  # type: ignore[arg-type]


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("n_kv_heads", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "documents"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_the_libraries_are_asked_for_what_eager_computes(name, kind, n_kv_heads) -> None:
    mechanism = MECHANISMS[name].for_layer(2, 16, 0).double()
    tensors = inputs(3, 2, LENGTH, 16, dtype=torch.float64, n_heads_kv=n_kv_heads)
    found, expected = (
        gradients(backend.attend, mechanism, tensors, packed(3, LENGTH, kind)) for backend in (flash, eager)
    )
    assert_same(found, expected, 1e-5 if "alibi" in name else 1e-9)  # slopes are float32


def test_changing_documents_do_not_compile_anything_again(monkeypatch) -> None:
    monkeypatch.setattr(flash, "unsupported_reason", lambda mechanism, q=None, dropout=0.0: None)
    assert_compiled_once(tiny(GPT, backend="flash"), tiny(GPT, backend="eager"))


def test_a_batch_tells_where_documents_begin_without_asking_the_device(monkeypatch) -> None:
    monkeypatch.setattr(flash, "unsupported_reason", lambda mechanism, q=None, dropout=0.0: None)
    monkeypatch.setattr(torch.Tensor, "nonzero", None)
    batch = batch_from_blocks(random_tokens(2, 17, vocab_size=4), end_of_document=0)
    tiny(GPT, backend="flash").logits_of(batch)
    without = tiny(GPT, backend="flash", document_masking=False)
    assert without.logits_of(batch).isfinite().all()
    packing = Documents(batch.document_ids, 16, torch.device("cpu"), batch.cu_seqlens, batch.longest).packing(2)
    assert (packing.cu_seqlens is batch.cu_seqlens, len(packing.longest)) == (True, batch.longest)
    packing = Documents(None, 16, torch.device("cpu"), batch.cu_seqlens, batch.longest).packing(2)
    assert (packing.cu_seqlens.tolist(), len(packing.longest)) == ([0, 16, 32], 16)


kinds = pytest.mark.parametrize("kind", ["dense", "documents"])
names = pytest.mark.parametrize("name", MECHANISMS)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def check_on_cuda(name: str, kind: str, width: int, dtype: torch.dtype) -> None:
    reason = flash.unsupported_reason(MECHANISMS[name], torch.empty(1, 2, 1, width, dtype=dtype, device="cuda"))
    if reason is not None:
        pytest.skip(reason)
    check_mechanism(flash, MECHANISMS[name], kind, shape(name, kind, width), dtype, "cuda")


def shape(name: str, kind: str, width: int) -> tuple[int, ...]:
    return 2, 2, 150 + sum(map(ord, name + kind)) % 100, width


@pytest.mark.gpu
@dtypes
@kinds
@names
def test_every_mechanism_on_the_gpu(name, kind, dtype) -> None:
    check_on_cuda(name, kind, 64, dtype)


@pytest.mark.gpu
@dtypes
@kinds
@pytest.mark.parametrize("width", [32, 80, 96, 128, 256])
def test_every_width_on_the_gpu(width, kind, dtype) -> None:
    check_on_cuda("log n", kind, width, dtype)


@kinds
@names
def test_a_perfect_kernel_passes_the_tests_on_the_gpu(name, kind) -> None:
    check_mechanism(perfect, MECHANISMS[name], kind, shape(name, kind, 64), torch.bfloat16)
