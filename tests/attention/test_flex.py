"""FlexAttention: uncompiled on CPU, where it has the forward pass alone; compiled on a GPU."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from anlit import AnGPT, ScaleInvariant
from anlit.attention.backends import eager, flex
from anlit.attention.documents import Documents
from anlit.data.batch import batch_from_blocks
from tests.attention import perfect
from tests.attention.kernels import MECHANISMS, assert_compiled_once, check
from tests.models.tiny import random_tokens, tiny

HEADS = 2


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(flex, "_compiled", lambda: flex._run)


def documents(kind: str, length: int) -> Documents:
    if kind == "dense":
        return Documents(None, length, torch.device("cpu"))
    share = {"short documents": 0.3, "long documents": 0.01}[kind]
    starts = torch.rand(2, length, generator=torch.Generator().manual_seed(3)) < share
    return Documents(starts.long().cumsum(1), length, torch.device("cpu"))


def inputs(length: int) -> Tensor:
    return torch.randn(4, 2, HEADS, length, 16, generator=torch.Generator().manual_seed(0))


kinds = pytest.mark.parametrize("kind", ["dense", "short documents", "long documents"])


@kinds
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.covering(1)
def test_the_forward_pass_is_eager(name, kind) -> None:
    mechanism = MECHANISMS[name].for_layer(HEADS, 16, 0)
    q, k, v, _ = inputs(150)
    with torch.no_grad():
        found = flex.attend(q, k, v, mechanism, documents(kind, 150), 0.0)
        expected = eager.attend(q.double(), k.double(), v.double(), mechanism.double(), documents(kind, 150), 0.0)
    assert ((found - expected).norm() / expected.norm()).item() < 1e-5


@kinds
@pytest.mark.parametrize("window", [None, 1, 3, 128, 140, 300])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 400])
def test_blocks_are_skipped_if_nothing_in_them_is_seen_and_not_masked_if_all_is(kind, window, length) -> None:
    packed = documents(kind, length)
    found = flex.block_mask(packed, window)
    visible = packed.mask(window).expand(2, 1, length, length)
    n_blocks = -(-length // flex.BLOCK)
    for b in range(2):
        for row in range(n_blocks):
            queries = slice(row * flex.BLOCK, (row + 1) * flex.BLOCK)
            partly, whole = listed(found, min(b, found.shape[0] - 1), row)
            for column in range(n_blocks):
                block = visible[b, 0, queries, column * flex.BLOCK : (column + 1) * flex.BLOCK]
                assert (column in whole) == bool(block.all()), (b, row, column)
                assert (column in partly) == (bool(block.any()) and not block.all()), (b, row, column)
    shape = (found.shape[0], 1, length, length)
    assert torch.equal(create_mask(found.mask_mod, *shape, device="cpu"), visible[: found.shape[0]])


def listed(found, b: int, row: int) -> tuple[list[int], list[int]]:
    pairs = ((found.kv_num_blocks, found.kv_indices), (found.full_kv_num_blocks, found.full_kv_indices))
    partly, whole = (columns[b, 0, row, : n[b, 0, row]].tolist() for n, columns in pairs)
    return partly, whole


def test_layers_share_the_blocks_of_a_batch(monkeypatch) -> None:
    found = []
    real = flex._find_blocks
    monkeypatch.setattr(flex, "_find_blocks", lambda *arguments: found.append(1) or real(*arguments))
    model = tiny(AnGPT, attention=ScaleInvariant(), backend="flex", n_layers=3)
    with torch.no_grad():
        for seed in range(2):
            batch = batch_from_blocks(random_tokens(2, 17, seed=seed), end_of_document=0)
            model.logits_of(batch)
            assert len(found) == seed + 1


def test_changing_documents_do_not_compile_anything_again() -> None:
    settings = {"attention": ScaleInvariant(learned="per_layer")}
    with torch.no_grad():
        assert_compiled_once(
            tiny(AnGPT, **settings, backend="flex"), tiny(AnGPT, **settings, backend="eager"), rtol=1e-4
        )


ON_CUDA = [
    ("plain", "dense", 64, torch.bfloat16),
    ("scale-invariant, c per layer", "dense", 128, torch.bfloat16),
    ("scale-invariant, c per layer", "documents", 64, torch.bfloat16),
    ("of one's own", "documents", 64, torch.bfloat16),
    ("window, scale-invariant", "documents", 80, torch.bfloat16),
    ("log bias", "dense", 32, torch.float16),
    ("scale-invariant", "documents", 256, torch.float16),
]
"""Few, for each takes a compilation."""
on_cuda = pytest.mark.parametrize(("name", "kind", "width", "dtype"), ON_CUDA)


@pytest.mark.gpu
@on_cuda
def test_on_cuda_it_is_eager_in_float64(name, kind, width, dtype) -> None:
    check(flex, name, kind, (2, HEADS, 333, width), dtype, "cuda")


@on_cuda
def test_a_perfect_kernel_passes_the_tests_on_the_gpu(name, kind, width, dtype) -> None:
    check(perfect, name, kind, (2, HEADS, 333, width), dtype)


def test_a_kernel_that_is_a_little_wrong_does_not(monkeypatch) -> None:
    attend = perfect.attend
    monkeypatch.setattr(perfect, "attend", lambda q, *others: attend(1.05 * q, *others))
    with pytest.raises(AssertionError, match="output: relative error"):
        check(perfect, "scale-invariant", "dense", (2, HEADS, 333, 64), torch.bfloat16)
