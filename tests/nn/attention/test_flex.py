"""FlexAttention on the CPU, uncompiled but for one test.

Test_gpu.py has the compiled kernels of a GPU.
"""

import copy
import itertools

import pytest
import torch
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_mask

from anlit.nn.kernels import eager, flex
from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.formula import distances
from tests.nn.attention.kernels import MECHANISMS, check, inputs, repeated

HEADS = 4


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda: flex._run)


def documents(kind: str, length: int) -> Documents:
    share = {"dense": None, "short documents": 0.3, "long documents": 0.01}[kind]
    starts = torch.rand(2, length, generator=torch.Generator().manual_seed(3)) < (share or 0)
    return Documents(starts.long().cumsum(1) if share else None, length, torch.device("cpu"))


kinds = pytest.mark.parametrize("kind", ["dense", "short documents", "long documents"])


@kinds
@pytest.mark.parametrize("n_kv_heads", [HEADS, 2])
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.covering(1)
def test_the_forward_pass_is_eager(name, n_kv_heads, kind) -> None:
    """Shared keys too: the score of head h has the table of head h."""
    mechanism = copy.deepcopy(MECHANISMS[name]).for_layer(HEADS, 16, 0)
    q, k, v, _ = inputs(2, HEADS, 150, 16, dtype=torch.float32, n_heads_kv=n_kv_heads)
    with torch.no_grad():
        result = flex.attend(q, k, v, mechanism, documents(kind, 150), 0.0)
        wide = (q.double(), k.double(), v.double(), copy.deepcopy(mechanism).double())
        expected = repeated(eager.attend)(*wide, documents(kind, 150), 0.0)
    assert ((result - expected).norm() / expected.norm()).item() < 1e-5


@pytest.mark.parametrize("kind", ["dense", "documents", "window"])
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.covering(1)
def test_the_gradients_are_those_of_the_formula(name, kind, monkeypatch) -> None:
    """Uncompiled, because PyTorch refuses a compiled backward pass on a CPU."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    check(flex, name, kind, (2, HEADS, 150, 16), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scale-invariant", "straight"])
def test_the_compiled_forward_pass_is_the_formula(name, monkeypatch) -> None:
    """Its options for a GPU do no harm on a CPU."""
    monkeypatch.setattr(flex, "_compiled", lambda: torch.compile(flex._run, dynamic=False))
    mechanism = copy.deepcopy(MECHANISMS[name]).for_layer(HEADS, 16, 0)
    q, k, v, _ = inputs(2, HEADS, 150, 16, dtype=torch.float32)
    packed = documents("short documents", 150)
    with torch.no_grad():
        result = flex.attend(q, k, v, mechanism, packed, 0.0)
        wide = (q.double(), k.double(), v.double(), copy.deepcopy(mechanism).double())
        expected = eager.attend(*wide, packed, 0.0)
    assert ((result - expected).norm() / expected.norm()).item() < 1e-5


@kinds
@pytest.mark.parametrize("window", [None, 1, 3, 128, 140, 300])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 400])
def test_blocks_are_skipped_if_nothing_in_them_is_seen_and_not_masked_if_all_is(
    kind, window, length
) -> None:
    packed = documents(kind, length)
    actual = flex.block_mask(packed, window)
    assert flex.block_mask(packed, window) is actual, "layers share the blocks of a batch"
    visible = packed.sees(0, distances(length, length, packed.device), window)
    rows, size, n_blocks = len(visible), flex.BLOCK, -(-length // flex.BLOCK)
    pairs = (
        (actual.kv_num_blocks, actual.kv_indices),
        (actual.full_kv_num_blocks, actual.full_kv_indices),
    )
    for b, i in itertools.product(range(rows), range(n_blocks)):
        partly, whole = (columns[b, 0, i, : n[b, 0, i]].tolist() for n, columns in pairs)
        for j, block in enumerate(visible[b, 0, i * size : (i + 1) * size].split(size, 1)):
            assert (j in whole) == bool(block.all()), (b, i, j)
            assert (j in partly) == (bool(block.any()) and not block.all()), (b, i, j)
    assert torch.equal(create_mask(actual.mask_mod, rows, 1, length, length, device="cpu"), visible)
