"""FlexAttention: uncompiled on CPU, where it has the forward pass alone; compiled on a GPU."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from anlit import AnGPT, ScaleInvariant
from anlit.attention.backends import eager, flex
from anlit.attention.documents import Documents
from anlit.data.batch import batch_from_blocks
from tests.attention.examples import LogNWithSlopes
from tests.attention.test_backends import MECHANISMS
from tests.models.tiny import random_tokens, tiny

HEADS = 2


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(flex, "_compiled", lambda: flex._run)


def documents(kind: str, length: int, device: str = "cpu") -> Documents:
    if kind == "dense":
        return Documents(None, length, torch.device(device))
    share = {"short documents": 0.3, "long documents": 0.01}[kind]
    starts = torch.rand(2, length, generator=torch.Generator().manual_seed(3)) < share
    return Documents(starts.long().cumsum(1).to(device), length, torch.device(device))


def inputs(length: int, dtype: torch.dtype, device: str = "cpu", width: int = 16) -> Tensor:
    drawn = torch.randn(4, 2, HEADS, length, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return drawn.to(device, dtype)


kinds = pytest.mark.parametrize("kind", ["dense", "short documents", "long documents"])


@kinds
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.covering(1)
def test_the_forward_pass_is_eager(name, kind) -> None:
    mechanism = MECHANISMS[name].for_layer(HEADS, 16, 0)
    q, k, v, _ = inputs(150, torch.float32)
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
    model = tiny(AnGPT, attention=ScaleInvariant(learned="per_layer"), backend="flex")
    plain = tiny(AnGPT, attention=ScaleInvariant(learned="per_layer"), backend="eager")
    graphs, first = [], 0

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for block in model.model.blocks:
        block.forward = torch.compile(block.forward, dynamic=False, fullgraph=True, backend=count)
    with torch.no_grad():
        for seed in range(4):
            batch = batch_from_blocks(random_tokens(2, 17, seed=seed, vocab_size=3 + seed), end_of_document=0)
            torch.testing.assert_close(model.logits_of(batch), plain.logits_of(batch), rtol=1e-4, atol=1e-5)
            first = len(graphs) if seed == 0 else first  # the first layer also makes the tables of positions
            assert len(graphs) == first, f"compiled {len(graphs)} times by batch {seed}"


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("width", [32, 64, 80, 96, 128, 256])
@kinds
@pytest.mark.parametrize("name", ["plain", "scale-invariant, c per layer", "of one's own", "window, scale-invariant"])
def test_on_cuda_it_is_eager_in_float64(name, kind, width, dtype, tolerance) -> None:
    results = []
    torch._dynamo.reset()
    for backend, kind_of_number in ((flex, dtype), (eager, torch.float64)):
        mechanism = {**MECHANISMS, "of one's own": LogNWithSlopes()}[name].for_layer(HEADS, width, 0).to("cuda")
        q, k, v, probe = inputs(333, kind_of_number, "cuda", width)
        for x in (q, k, v):
            x.requires_grad_()
        out = backend.attend(q, k, v, mechanism, documents(kind, 333, "cuda"), 0.0)
        (out * probe).sum().backward()
        results.append([out, q.grad, k.grad, v.grad, *(p.grad for p in mechanism.parameters())])
    for found, expected in zip(*results, strict=True):
        assert (found.double() - expected.double()).norm() / expected.double().norm() < tolerance
