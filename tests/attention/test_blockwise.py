"""Our kernel for CPUs: every mechanism, gradients of q, k, v and of what is learned, at lengths around its blocks."""

import pytest
import torch

from anlit import Plain, ScaleInvariant
from anlit.attention.attention import Attention
from anlit.attention.backends import blockwise, eager
from tests.attention.kernels import MECHANISMS, assert_same, check, gradients, inputs, packed, packings

HEADS, WIDTH = 3, 8
rooms = pytest.mark.parametrize("room", [0, 2**30], ids=["recomputed", "kept"])
"""For kept weights: none, so that they are computed again, or as many as there are."""


def numbers(length: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return inputs(2, HEADS, length, WIDTH, dtype=dtype)


@packings
@rooms
@pytest.mark.parametrize("name", MECHANISMS)
def test_blockwise_is_eager(name, room, kind, monkeypatch) -> None:
    """Two whole blocks of queries and a rest; windows that begin inside of a block and beyond it."""
    monkeypatch.setattr(blockwise, "KEPT_WEIGHTS", room)
    monkeypatch.setattr(blockwise, "QUERIES", 16)
    given = MECHANISMS[name].for_layer(HEADS, WIDTH, 0).double(), numbers(39), packed(2, 39, kind)
    assert_same(gradients(blockwise.attend, *given), gradients(eager.attend, *given))


@rooms
@pytest.mark.parametrize(
    ("length", "kind"), [(n, "dense") for n in (1, 2, 127, 128, 129, 300)] + [(n, "documents") for n in (127, 129, 300)]
)
def test_any_length(length, kind, room, monkeypatch) -> None:
    monkeypatch.setattr(blockwise, "KEPT_WEIGHTS", room)
    check(blockwise, "scale-invariant", kind, (2, HEADS, length, WIDTH), torch.float32)


def test_what_documents_hide_is_not_computed(monkeypatch) -> None:
    monkeypatch.setattr(blockwise, "QUERIES", 64)
    starts = torch.tensor([[0] * 100 + [100] * 156, [0] * 256], dtype=torch.int32)
    found = blockwise.blocks(2, 256, starts, None)
    assert [(b.row, b.first) for b in found] == [(row, first) for row in range(2) for first in (0, 64, 128, 192)]
    assert [b.begin for b in found] == [0, 0, 100, 100, 0, 0, 0, 0]
    assert [b.begin for b in blockwise.blocks(2, 256, None, 30)] == [0, 35, 99, 163]


def test_nothing_is_kept_without_gradients() -> None:
    q, k, v, _ = numbers(33, torch.float32)
    mechanism = Plain().for_layer(HEADS, WIDTH, 0)
    for keeps, n_numbers in ((False, 0), (True, 2 * HEADS * 33 * 33)):
        _, kept = blockwise.blockwise_attention(q, k, v, None, None, None, None, keeps)
        assert kept.numel() == n_numbers
    torch.testing.assert_close(
        blockwise.attend(q, k, v, mechanism, packed(2, 33, "dense"), 0.0),
        eager.attend(q, k, v, mechanism, packed(2, 33, "dense"), 0.0),
    )


@packings
@rooms
@pytest.mark.parametrize("n_kv_heads", [1, HEADS])
def test_it_is_an_operator_of_torch(n_kv_heads, room, kind, monkeypatch) -> None:
    """Its fake kernels, its schema and its autograd formula are what torch.compile relies on."""
    monkeypatch.setattr(blockwise, "KEPT_WEIGHTS", room)
    q, k, v, _ = numbers(70)
    k, v = k[:, :n_kv_heads].clone(), v[:, :n_kv_heads].clone()
    a, m = torch.rand(2, HEADS, 70, dtype=torch.float64)
    bounds = packed(2, 70, kind).bounds
    starts = None if bounds is None else bounds[0]
    arguments = (*(x.requires_grad_() for x in (q, k, v, a, m)), starts, 40, True)
    torch.library.opcheck(torch.ops.anlit.blockwise_attention.default, arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype) -> None:
    exact = numbers(100)[:3]
    rounded = [x.to(dtype).requires_grad_() for x in exact]
    mechanism = ScaleInvariant().for_layer(HEADS, WIDTH, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = blockwise.attend(*rounded, mechanism, packed(2, 100, "documents"), 0.0)
        out.float().square().sum().backward()
    assert out.dtype == rounded[0].grad.dtype == dtype
    wide = eager.attend(*(x.detach().double() for x in rounded), mechanism, packed(2, 100, "documents"), 0.0)
    torch.testing.assert_close(out.double(), wide, rtol=1e-2, atol=1e-3)  # the output's own rounding


def test_dropout_is_refused() -> None:
    with pytest.raises(ValueError, match="does not drop attention weights"):
        Attention(Plain().for_layer(HEADS, WIDTH, 0), "blockwise", 0.1)
