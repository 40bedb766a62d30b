"""FlexAttention on the CPU. Most tests run it uncompiled; test_gpu.py has a GPU's kernels."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_mask

from anlit.nn.kernels import eager, flex
from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.formula import distances
from anlit.nn.mechanisms.mechanism import Mechanism
from tests.nn.attention.kernels import (
    MECHANISMS,
    WITHOUT_GAIN,
    check,
    inputs,
    repeated,
    slow_except,
)

HEADS = 4
LENGTH = 150
WIDTH = 16
ENDS = {"short documents": 0.3, "long documents": 0.01}
"""The share of tokens that end a document."""

kinds = pytest.mark.parametrize("kind", ["dense", *ENDS])


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda: flex._run)


def documents(kind: str, length: int) -> Documents:
    device = torch.device("cpu")
    if kind == "dense":
        return Documents(None, length, device)
    generator = torch.Generator().manual_seed(3)
    is_start = torch.rand(2, length, generator=generator) < ENDS[kind]
    return Documents(is_start.long().cumsum(1), length, device)


def layer_of(name: str) -> Mechanism:
    return copy.deepcopy(MECHANISMS[name]).for_layer(HEADS, WIDTH, 0)


@torch.no_grad()
def assert_is_formula(name: str, tensors: list[Tensor], packed: Documents) -> None:
    """Compare outputs with the readable kernel in float64, with keys copied for each head."""
    q, k, v, _ = tensors
    mechanism = layer_of(name)

    result = flex.attend(q, k, v, mechanism, packed, 0.0)

    attend_eagerly = repeated(eager.attend)
    wide_mechanism = copy.deepcopy(mechanism).double()
    wide_q, wide_k, wide_v = [x.double() for x in (q, k, v)]
    expected = attend_eagerly(wide_q, wide_k, wide_v, wide_mechanism, packed, 0.0)
    error = result - expected
    assert error.norm() < 1e-5 * expected.norm()


SHARED_KEYS = (
    "plain",
    "log n",
    "scale-invariant, c per layer",
    "alibi",
    "window, scale-invariant",
    "a user's",
)
"""Mechanisms with tables and masks of different kinds."""


@kinds
@pytest.mark.parametrize("n_kv_heads", [HEADS, 2])
@pytest.mark.parametrize("name", slow_except(SHARED_KEYS, MECHANISMS))
@pytest.mark.covering(1)
def test_the_forward_pass_is_eager(name, n_kv_heads, kind) -> None:
    """Shared keys too: the score of head h has the table of head h."""
    shape = (2, HEADS, LENGTH, WIDTH)
    tensors = inputs(*shape, n_heads_kv=n_kv_heads)

    assert_is_formula(name, tensors, documents(kind, LENGTH))


@pytest.mark.parametrize("kind", ["dense", "documents", "window"])
@pytest.mark.parametrize("name", slow_except([*WITHOUT_GAIN, "a user's"], MECHANISMS))
@pytest.mark.covering(1)
def test_the_gradients_are_those_of_the_formula(name, kind, monkeypatch) -> None:
    """Uncompiled, because PyTorch refuses a compiled backward pass on a CPU."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)

    check(flex, name, kind, (2, HEADS, LENGTH, WIDTH), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scale-invariant", "straight"])
def test_the_compiled_forward_pass_is_the_formula(name, monkeypatch) -> None:
    """Its options for a GPU do no harm on a CPU."""
    compiled = torch.compile(flex._run, dynamic=False)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    tensors = inputs(2, HEADS, LENGTH, WIDTH)

    assert_is_formula(name, tensors, documents("short documents", LENGTH))


def listed(counts: Tensor, columns: Tensor, row: int, block_row: int) -> list[int]:
    """The blocks of keys that a block mask lists for a block of queries."""
    count = int(counts[row, 0, block_row])
    return columns[row, 0, block_row, :count].tolist()


@kinds
@pytest.mark.parametrize("window", [None, 1, 3, 128, 140, 300])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 400])
def test_blocks_are_skipped_if_nothing_in_them_is_seen_and_not_masked_if_all_is(
    kind, window, length
) -> None:
    packed = documents(kind, length)
    t = distances(length, length, packed.device)
    is_visible = packed.sees(0, t, window)  # (rows, 1, queries, keys)
    n_rows = len(is_visible)

    mask = flex.block_mask(packed, window)

    assert flex.block_mask(packed, window) is mask, "layers share the blocks of a batch"
    for row in range(n_rows):
        for i, block_row in enumerate(is_visible[row, 0].split(flex.BLOCK, 0)):
            partly_visible = listed(mask.kv_num_blocks, mask.kv_indices, row, i)
            wholly_visible = listed(mask.full_kv_num_blocks, mask.full_kv_indices, row, i)
            for j, block in enumerate(block_row.split(flex.BLOCK, 1)):
                is_whole = bool(block.all())
                is_partial = bool(block.any()) and not is_whole
                assert (j in wholly_visible) == is_whole, (row, i, j)
                assert (j in partly_visible) == is_partial, (row, i, j)
    mask_of_pairs = create_mask(mask.mask_mod, n_rows, 1, length, length, device="cpu")
    assert torch.equal(mask_of_pairs, is_visible)
