"""The kernels that run on a CPU against the formula written out in float64, on memory full of NaN.

The formula as an independent version has it is in tests/parity.
"""

import copy

import pytest
import torch

from anlit import Plain, ScaleInvariant
from anlit.nn.kernels import blockwise, eager, sdpa
from tests.nn.attention import kernels
from tests.nn.attention.kernels import (
    MECHANISMS,
    WIDTHS,
    assert_same,
    check,
    gradients,
    inputs,
    packed,
    windowed,
)

pytestmark = pytest.mark.usefixtures("poison")
KERNELS = {"eager": eager, "sdpa": sdpa, "blockwise": blockwise}
WAYS = {
    "eager": (eager, "QUERIES_PER_BLOCK", 16), "eager, in parts": (eager, "SMALLEST_SLICE", 5),
    "sdpa, each document": (sdpa, "SHORTEST_MEAN", 1), "sdpa, masked": (sdpa, "SHORTEST_MEAN", 1000),
    "blockwise, recomputed": (blockwise, "LARGEST_SAVED", 0), "blockwise, kept": (blockwise, "LARGEST_SAVED", 2**30),
}  # fmt: skip
"""The kernel, and the name and value of the setting that decides the way through it."""
CASES = [(way, name) for way in WAYS for name in MECHANISMS
         if WAYS[way][0].unsupported_reason(MECHANISMS[name]) is None]  # fmt: skip
H, D = 4, 8


@kernels.kinds
@pytest.mark.parametrize("n_kv_heads", [1, 2, H])
@pytest.mark.parametrize(("way", "name"), CASES)
@pytest.mark.covering(2)
def test_every_mechanism_is_the_formula(way, name, n_kv_heads, kind, monkeypatch) -> None:
    """Output and gradients, at two whole blocks of queries and a rest; shared keys are as keys copied for each head."""
    kernel, setting, value = WAYS[way]
    mechanism = windowed(copy.deepcopy(MECHANISMS[name]), kind).for_layer(H, D, 0).double()
    tensors = inputs(2, H, 39, D, dtype=torch.float64, n_heads_kv=n_kv_heads)
    expected = gradients(kernels.repeated(eager.attend), mechanism, tensors, packed(2, 39, kind))
    monkeypatch.setattr(eager, "QUERIES_PER_BLOCK", 16)
    monkeypatch.setattr(blockwise, "QUERIES", 16)
    monkeypatch.setattr(kernel, setting, value)
    result = gradients(kernel.attend, mechanism, tensors, packed(2, 39, kind))
    assert_same(result, expected)


@kernels.kinds
@kernels.dtypes
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_width_and_dtype_is_the_reference(kernel, width, dtype, kind) -> None:
    name = "log bias" if kernel == "sdpa" else "scale-invariant"
    length = 64 * (width % 3) + 1 + (width + len(kind)) % 63
    check(KERNELS[kernel], name, kind, (1, 2, length, width), dtype)


@kernels.packings
@pytest.mark.parametrize("room", [0, 2**30])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 300])
def test_any_length_of_blockwise(length, kind, room, monkeypatch) -> None:
    monkeypatch.setattr(blockwise, "LARGEST_SAVED", room)
    check(
        blockwise,
        "scale-invariant",
        kind if length > 2 else "dense",
        (2, 3, length, D),
        torch.float32,
    )


def test_a_long_sequence_keeps_no_logits_for_the_backward_pass() -> None:
    """It takes blocks of 512 queries, each of which the backward pass computes again."""
    for length, is_kept in ((512, True), (513, False)):
        kept: list[torch.Tensor] = []
        q, k, v, _ = (x.requires_grad_() for x in inputs(1, 1, length, D, dtype=torch.float32))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, kept=kept: kept.append(x) or x, lambda x: x
        ):
            eager.attend(q, k, v, ScaleInvariant(), packed(1, length, "dense"), 0.0)
        assert (
            any(x.numel() >= 128 * 512 for x in kept) == is_kept
        )  # of the last quarter of the queries


def test_the_order_of_pytorchs_kernels_can_be_compiled(monkeypatch) -> None:
    """As on Hopper, where cuDNN's is asked for first; on a CPU it is passed over."""
    q, k, v, _ = inputs(1, 3, 13, D, dtype=torch.float32)
    expected = sdpa.fused(q, k, v, is_causal=True)
    monkeypatch.setattr(sdpa, "prefers_cudnn", lambda q, mask: True)
    for fused in (
        sdpa.fused,
        torch.compile(sdpa.fused, fullgraph=True, dynamic=False, backend="eager"),
    ):
        assert torch.equal(fused(q, k, v, is_causal=True), expected)


@pytest.mark.parametrize("kernel", [eager, sdpa], ids=["eager", "sdpa"])
def test_dropout_drops_weights_and_keeps_the_mean(kernel) -> None:
    q, k, v, _ = inputs(2, 3, 6, D, dtype=torch.float32)
    torch.manual_seed(0)
    given = q, k, torch.ones_like(v), Plain(), packed(2, 6, "dense"), 0.5
    outputs = torch.stack([kernel.attend(*given) for _ in range(400)])
    assert outputs.std(0).max() > 0.3
    assert outputs.mean() == pytest.approx(1, abs=0.03)


def test_blockwise_does_not_compute_what_documents_and_windows_hide(monkeypatch) -> None:
    monkeypatch.setattr(blockwise, "QUERIES", 64)
    starts = torch.tensor([[0] * 100 + [100] * 156, [0] * 256], dtype=torch.int32)
    blocks = [(b.row, b.first, b.begin) for b in blockwise.find_blocks(2, 256, starts, None)]
    assert blocks[:4] == [(0, 0, 0), (0, 64, 0), (0, 128, 100), (0, 192, 100)]
    assert blocks[4:] == [(1, first, 0) for first in (0, 64, 128, 192)]
    assert [b.begin for b in blockwise.find_blocks(2, 256, None, 30)] == [0, 35, 99, 163]


@pytest.mark.parametrize(("keeps", "n_numbers"), [(False, 0), (True, 2 * 3 * 33 * 33)])
def test_blockwise_keeps_nothing_without_gradients(keeps, n_numbers) -> None:
    q, k, v, _ = inputs(2, 3, 33, D, dtype=torch.float32)
    assert (
        blockwise.blockwise_attention(q, k, v, None, None, None, None, keeps)[1].numel()
        == n_numbers
    )


@kernels.packings
@pytest.mark.parametrize("room", [0, 2**30])
@pytest.mark.parametrize("n_kv_heads", [1, 3])
def test_blockwise_is_an_operator_of_torch(n_kv_heads, room, kind, monkeypatch) -> None:
    """Its fake kernels, its schema and its autograd formula are what torch.compile relies on."""
    monkeypatch.setattr(blockwise, "LARGEST_SAVED", room)
    q, k, v, _ = inputs(2, 3, 70, D, dtype=torch.float64, n_heads_kv=n_kv_heads)
    tensors = (x.requires_grad_() for x in (q, k, v, *torch.rand(2, 3, 70, dtype=torch.float64)))
    starts, _ = packed(2, 70, kind).bounds or (None, None)
    torch.library.opcheck(torch.ops.anlit.blockwise_attention.default, (*tensors, starts, 40, True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blockwise_computes_half_precision_in_float32_under_autocast(dtype) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(blockwise, "scale-invariant", "documents", (2, 3, 100, D), dtype)
