"""FlexAttention, uncompiled on the CPU, where it has the forward pass alone; test_gpu.py has the rest."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from anlit import AnGPT, ScaleInvariant
from anlit.attention.backends import eager, flex
from anlit.attention.documents import Documents
from anlit.data.batch import batch_from_blocks
from tests.attention.kernels import MECHANISMS, assert_compiled_once, inputs, repeated
from tests.models.tiny import random_tokens, tiny

HEADS = 4


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda: flex._run)


def documents(kind: str, length: int) -> Documents:
    if kind == "dense":
        return Documents(None, length, torch.device("cpu"))
    share = {"short documents": 0.3, "long documents": 0.01}[kind]
    starts = torch.rand(2, length, generator=torch.Generator().manual_seed(3)) < share
    return Documents(starts.long().cumsum(1), length, torch.device("cpu"))


kinds = pytest.mark.parametrize("kind", ["dense", "short documents", "long documents"])


@kinds
@pytest.mark.parametrize("n_kv_heads", [HEADS, 2])
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.covering(1)
def test_the_forward_pass_is_eager(name, n_kv_heads, kind) -> None:
    """Shared keys too: the score of head h has the table of head h."""
    mechanism = MECHANISMS[name].for_layer(HEADS, 16, 0)
    q, k, v, _ = inputs(2, HEADS, 150, 16, dtype=torch.float32, n_heads_kv=n_kv_heads)
    with torch.no_grad():
        result = flex.attend(q, k, v, mechanism, documents(kind, 150), 0.0)
        wide = (q.double(), k.double(), v.double(), mechanism.double())
        expected = repeated(eager.attend)(*wide, documents(kind, 150), 0.0)
    assert ((result - expected).norm() / expected.norm()).item() < 1e-5


@kinds
@pytest.mark.parametrize("window", [None, 1, 3, 128, 140, 300])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 400])
def test_blocks_are_skipped_if_nothing_in_them_is_seen_and_not_masked_if_all_is(kind, window, length) -> None:
    packed = documents(kind, length)
    actual = flex.block_mask(packed, window)
    visible = packed.mask(window).expand(2, 1, length, length)
    n_blocks = -(-length // flex.BLOCK)
    for b in range(2):
        for row in range(n_blocks):
            queries = slice(row * flex.BLOCK, (row + 1) * flex.BLOCK)
            partly, whole = listed(actual, min(b, actual.shape[0] - 1), row)
            for column in range(n_blocks):
                block = visible[b, 0, queries, column * flex.BLOCK : (column + 1) * flex.BLOCK]
                assert (column in whole) == bool(block.all()), (b, row, column)
                assert (column in partly) == (bool(block.any()) and not block.all()), (b, row, column)
    shape = (actual.shape[0], 1, length, length)
    assert torch.equal(create_mask(actual.mask_mod, *shape, device="cpu"), visible[: actual.shape[0]])


def listed(actual, b: int, row: int) -> tuple[list[int], list[int]]:
    pairs = ((actual.kv_num_blocks, actual.kv_indices), (actual.full_kv_num_blocks, actual.full_kv_indices))
    partly, whole = (columns[b, 0, row, : n[b, 0, row]].tolist() for n, columns in pairs)
    return partly, whole


def test_layers_share_the_blocks_of_a_batch(monkeypatch) -> None:
    actual = []
    real = flex._find_blocks
    monkeypatch.setattr(flex, "_find_blocks", lambda *arguments: actual.append(1) or real(*arguments))
    model = tiny(AnGPT, attention=ScaleInvariant(), backend="flex", n_layers=3)
    with torch.no_grad():
        for seed in range(2):
            batch = batch_from_blocks(random_tokens(2, 17, seed=seed), end_of_document=0)
            model.logits_of(batch)
            assert len(actual) == seed + 1


def test_changing_documents_do_not_compile_anything_again() -> None:
    settings = {"attention": ScaleInvariant(learned="per_layer")}
    with torch.no_grad():
        assert_compiled_once(
            tiny(AnGPT, **settings, backend="flex"), tiny(AnGPT, **settings, backend="eager"), rtol=1e-4
        )
