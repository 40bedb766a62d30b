"""Flash attention with stand-ins for its libraries, and on a GPU with the real ones."""

import pytest
import torch
from torch import Tensor

from anlit import GPT, ALiBi, LogN, Plain, SlidingWindow
from anlit.attention.backends import eager, flash
from anlit.attention.backends.flash import flash_attention
from anlit.attention.documents import Documents
from anlit.data.batch import batch_from_blocks
from tests.attention import perfect
from tests.attention.flash_libraries import Calls, pretend_package, pretend_pytorch
from tests.attention.kernels import assert_compiled_once, check_mechanism
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
LIBRARIES = {"package": pretend_package, "pytorch": pretend_pytorch}
LENGTH = 13
IDS = torch.tensor([[0] * 4 + [1] + [2] * 8, [0] * 13, [0] * 12 + [1]])  # documents of one token among them
PACKED = torch.tensor([0, 4, 5, 13, 26, 38, 39], dtype=torch.int32)


def run(attend, mechanism, packed: bool, n_kv_heads: int = 2) -> dict[str, Tensor]:
    mechanism = mechanism.for_layer(2, 16, 0).double()
    generator = torch.Generator().manual_seed(0)
    q, k, v, probe = torch.randn(4, len(IDS), 2, LENGTH, 16, generator=generator, dtype=torch.float64)
    k, v = k[:, :n_kv_heads].clone(), v[:, :n_kv_heads].clone()
    for x in (q, k, v):
        x.requires_grad_()
    documents = Documents(IDS if packed else None, LENGTH, torch.device("cpu"), PACKED, 13)
    out = attend(q, k, v, mechanism, documents, 0.0)
    (out * probe).sum().backward()
    learned = {name: parameter.grad for name, parameter in mechanism.named_parameters()}
    return {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad, **learned}


@pytest.mark.parametrize("n_kv_heads", [1, 2])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "documents"])
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_libraries_are_asked_for_what_eager_computes(library, name, packed, n_kv_heads, monkeypatch) -> None:
    if library == "pytorch" and "alibi" in name:
        return
    calls: Calls = LIBRARIES[library](monkeypatch)
    found, expected = (
        run(backend.attend, MECHANISMS[name], packed, n_kv_heads=n_kv_heads) for backend in (flash, eager)
    )
    assert found.keys() == expected.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-5)  # slopes and lse are float32
    if packed or (library == "pytorch" and "window" in name):
        assert calls == ["forward", "backward"]
    else:
        assert calls == (["dense"] if library == "package" else [])


def test_an_implementation_that_was_activated_goes_before_the_package(monkeypatch) -> None:
    package, pytorch = pretend_package(monkeypatch), pretend_pytorch(monkeypatch)
    monkeypatch.setattr(flash, "HAS_PACKAGE", True)
    monkeypatch.setattr(flash, "current_flash_attention_impl", lambda: "FA4")
    run(flash.attend, Plain(), True)
    assert (package, pytorch) == ([], ["forward", "backward"])
    run(flash.attend, ALiBi(), True)  # of which PyTorch knows nothing
    assert (package, pytorch) == (["forward", "backward"], ["forward", "backward"])


def test_the_operator_is_one_that_torch_compile_can_take(monkeypatch) -> None:
    pretend_pytorch(monkeypatch)
    q, k, v = torch.randn(3, 39, 2, 8, requires_grad=True)
    bounds, counts = Documents(IDS, LENGTH, torch.device("cpu"), PACKED, 13).packing(3)
    arguments = (q.detach().requires_grad_(), k, v, bounds, counts, None, -1, 0.3, False)
    torch.library.opcheck(flash_attention, arguments, test_utils=("test_schema", "test_faketensor"))


def test_changing_documents_do_not_compile_anything_again(monkeypatch) -> None:
    pretend_pytorch(monkeypatch)
    monkeypatch.setattr(flash, "reason_against", lambda mechanism, q=None, dropout=0.0: None)
    assert_compiled_once(tiny(GPT, backend="flash"), tiny(GPT, backend="eager"))


def test_a_batch_tells_where_documents_begin_without_asking_the_device(monkeypatch) -> None:
    pretend_pytorch(monkeypatch)
    monkeypatch.setattr(flash, "reason_against", lambda mechanism, q=None, dropout=0.0: None)
    monkeypatch.setattr(torch.Tensor, "nonzero", None)
    batch = batch_from_blocks(random_tokens(2, 17, vocab_size=4), end_of_document=0)
    tiny(GPT, backend="flash").logits_of(batch)
    without = tiny(GPT, backend="flash", document_masking=False)
    documents = Documents(None, 16, torch.device("cpu"), batch.cu_seqlens, batch.longest)
    assert documents.packing(2).bounds[:3].tolist() == [0, 16, 32]
    assert documents.packing(2).counts.tolist() == [2, 16]
    assert without.logits_of(batch).isfinite().all()


kinds = pytest.mark.parametrize("kind", ["dense", "documents"])
names = pytest.mark.parametrize("name", MECHANISMS)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def check_on_cuda(name: str, kind: str, width: int, dtype: torch.dtype) -> None:
    reason = flash.reason_against(MECHANISMS[name], torch.empty(1, 2, 1, width, dtype=dtype, device="cuda"))
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
