"""The kernels that run on a CPU against the readable kernel in float64, on memory full of NaN.

tests/parity has an independent version of the formula.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from anlit import Plain, ScaleInvariant
from anlit.nn.kernels import KERNELS as ALL_KERNELS
from anlit.nn.kernels import blockwise, eager, sdpa
from tests.nn.attention import kernels
from tests.nn.attention.kernels import (
    MECHANISMS,
    WIDTHS,
    assert_same,
    check,
    gradients,
    inputs,
    layer_of,
    packed,
)

pytestmark = pytest.mark.usefixtures("poison")
H = 4
D = 8
KERNELS = {"eager": eager, "sdpa": sdpa, "blockwise": blockwise}
PATHS = {
    "eager": (eager, "QUERIES_PER_BLOCK", 16),
    "eager, in slices": (eager, "SMALLEST_SLICE", 5),
    "sdpa, each document": (sdpa, "SHORTEST_MEAN", 1),
    "sdpa, masked": (sdpa, "SHORTEST_MEAN", 1000),
    "blockwise, recomputed": (blockwise, "LARGEST_SAVED", 0),
    "blockwise, saved": (blockwise, "LARGEST_SAVED", 2**30),
}
"""The kernel, and the name and value of the constant that decides the path through it."""


def list_cases() -> list[tuple[str, str]]:
    """The paths, with the mechanisms that their kernel can compute."""
    cases = []
    for path, (kernel, _, _) in PATHS.items():
        for name in MECHANISMS:
            if kernel.unsupported_reason(MECHANISMS[name]) is None:
                cases.append((path, name))
    return cases


def test_every_kernel_that_a_cpu_can_run_is_compared_here() -> None:
    mechanism = Plain().for_layer(H, D, 0)
    able_kernels = {}
    for name, kernel in ALL_KERNELS.items():
        if kernel.unsupported_reason(mechanism, torch.zeros(1, H, 1, D)) is None:
            able_kernels[name] = kernel

    compared_kernels = {kernel for kernel, _, _ in PATHS.values()}
    assert able_kernels == KERNELS
    assert compared_kernels == {*KERNELS.values()}


@kernels.kinds
@pytest.mark.parametrize("n_kv_heads", [1, 2, H])
@pytest.mark.parametrize(("path", "name"), list_cases())
@pytest.mark.covering(2)
def test_every_mechanism_is_the_formula(path, name, n_kv_heads, kind, monkeypatch) -> None:
    """Output and gradients, at two and a half blocks of queries.

    Shared keys are like keys copied per head.
    """
    kernel, constant, value = PATHS[path]
    mechanism = layer_of(name, kind, H, D).double()
    tensors = inputs(2, H, 39, D, dtype=torch.float64, n_heads_kv=n_kv_heads)
    documents = packed(2, 39, kind)
    attend_eagerly = kernels.repeated(eager.attend)
    expected = gradients(attend_eagerly, mechanism, tensors, documents)
    monkeypatch.setattr(eager, "QUERIES_PER_BLOCK", 16)
    monkeypatch.setattr(blockwise, "QUERIES", 16)
    monkeypatch.setattr(kernel, constant, value)

    result = gradients(kernel.attend, mechanism, tensors, documents)

    assert_same(result, expected)


@kernels.kinds
@kernels.dtypes
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_width_and_dtype_is_the_reference(kernel, width, dtype, kind) -> None:
    name = "log bias" if kernel == "sdpa" else "scale-invariant"
    n_blocks = width % 3
    n_more = (width + len(kind)) % 63
    length = 64 * n_blocks + 1 + n_more
    shape = (1, 2, length, width)

    check(KERNELS[kernel], name, kind, shape, dtype)


@kernels.packings
@pytest.mark.parametrize("largest_saved", [0, 2**30])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 300])
def test_any_length_of_blockwise(length, kind, largest_saved, monkeypatch) -> None:
    monkeypatch.setattr(blockwise, "LARGEST_SAVED", largest_saved)
    if length <= 2:
        kind = "dense"

    check(blockwise, "scale-invariant", kind, (2, 3, length, D), torch.float32)


@pytest.mark.parametrize(
    ("length", "are_logits_saved"),
    [
        (512, True),
        (513, False),
    ],
)
def test_a_long_sequence_saves_no_logits_for_the_backward_pass(length, are_logits_saved) -> None:
    """It takes blocks of 512 queries, which the backward pass computes again."""
    sizes: list[int] = []

    def record_size(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.numel())
        return x

    q, k, v, _ = inputs(1, 1, length, D)
    q.requires_grad_()
    documents = packed(1, length, "dense")

    with torch.autograd.graph.saved_tensors_hooks(record_size, lambda x: x):
        eager.attend(q, k, v, ScaleInvariant(), documents, 0.0)

    logits_of_last_slice = 128 * 512
    assert (max(sizes) >= logits_of_last_slice) == are_logits_saved


def test_the_order_of_pytorchs_kernels_can_be_compiled(monkeypatch) -> None:
    """As on Hopper, where cuDNN's is asked for first; on a CPU it is passed over."""
    q, k, v, _ = inputs(1, 3, 13, D)
    expected = sdpa.fused(q, k, v, is_causal=True)
    monkeypatch.setattr(sdpa, "order_of_kernels", lambda q, mask: sdpa.PRIORITY)
    compiled = torch.compile(sdpa.fused, fullgraph=True, dynamic=False, backend="eager")

    uncompiled_result = sdpa.fused(q, k, v, is_causal=True)
    compiled_result = compiled(q, k, v, is_causal=True)

    assert torch.equal(uncompiled_result, expected)
    assert torch.equal(compiled_result, expected)


@pytest.mark.parametrize(
    ("generation", "trains", "expected"),
    [
        (9, True, sdpa.PRIORITY),
        (9, False, sdpa.WITHOUT_CUDNN),
        (8, True, None),
        (8, False, None),
        (12, True, None),
    ],
)
def test_cudnn_computes_training_only(generation, trains, expected, monkeypatch) -> None:
    """It would build a plan for each length of a generated text."""
    monkeypatch.setattr(sdpa, "gpu_generation", lambda: generation)
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, 64, device="cuda", requires_grad=trains)
        mask = torch.empty(1, 1, 8, 8, device="cuda")

    order = sdpa.order_of_kernels(q, None)
    order_with_mask = sdpa.order_of_kernels(q, mask)

    assert order == expected
    assert order_with_mask == (None if trains else expected)


@pytest.mark.parametrize("kernel", [eager, sdpa], ids=["eager", "sdpa"])
def test_dropout_drops_weights_and_keeps_the_mean(kernel) -> None:
    q, k, v, _ = inputs(2, 3, 6, D)
    ones = torch.ones_like(v)
    documents = packed(2, 6, "dense")
    torch.manual_seed(0)

    draws = []
    for _ in range(400):
        draws.append(kernel.attend(q, k, ones, Plain(), documents, 0.5))

    outputs = torch.stack(draws)
    assert outputs.std(0).max() > 0.3
    assert outputs.mean() == pytest.approx(1, abs=0.03)


def test_blockwise_does_not_compute_what_documents_and_windows_hide(monkeypatch) -> None:
    monkeypatch.setattr(blockwise, "QUERIES", 64)
    starts = torch.zeros(2, 256, dtype=torch.int32)
    starts[0, 100:] = 100  # the second document of row 0

    blocks_of_rows = blockwise.find_blocks(2, 256, starts, None)
    blocks_of_window = blockwise.find_blocks(2, 256, None, 30)

    first_keys_of_rows = [(block.row, block.first, block.begin) for block in blocks_of_rows]
    first_keys_in_window = [block.begin for block in blocks_of_window]
    assert first_keys_of_rows == [
        (0, 0, 0),
        (0, 64, 0),
        (0, 128, 100),
        (0, 192, 100),
        (1, 0, 0),
        (1, 64, 0),
        (1, 128, 0),
        (1, 192, 0),
    ]
    assert first_keys_in_window == [0, 35, 99, 163]


@pytest.mark.parametrize(
    ("needs_gradients", "n_numbers"),
    [
        (False, 0),
        (True, 2 * 3 * 33 * 33),
    ],
)
def test_blockwise_saves_nothing_without_gradients(needs_gradients, n_numbers) -> None:
    q, k, v, _ = inputs(2, 3, 33, D)
    options = {"a": None, "m": None, "starts": None, "window": None}

    _, saved = blockwise.blockwise_attention(q, k, v, **options, needs_gradients=needs_gradients)

    assert saved.numel() == n_numbers


@kernels.packings
@pytest.mark.parametrize("largest_saved", [0, 2**30])
@pytest.mark.parametrize("n_kv_heads", [1, 3])
@pytest.mark.covering(1)
def test_blockwise_is_an_operator_of_torch(n_kv_heads, largest_saved, kind, monkeypatch) -> None:
    """torch.compile relies on its fake kernels, its schema and its autograd formula."""
    monkeypatch.setattr(blockwise, "LARGEST_SAVED", largest_saved)
    q, k, v, _ = inputs(2, 3, 70, D, dtype=torch.float64, n_heads_kv=n_kv_heads)
    a, m = torch.rand(2, 3, 70, dtype=torch.float64)
    tensors = [x.requires_grad_() for x in (q, k, v, a, m)]
    bounds = packed(2, 70, kind).bounds
    starts = None if bounds is None else bounds[0]
    window = 40
    needs_gradients = True
    operator = torch.ops.anlit.blockwise_attention.default

    torch.library.opcheck(operator, (*tensors, starts, window, needs_gradients))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blockwise_computes_half_precision_in_float32_under_autocast(dtype) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(blockwise, "scale-invariant", "documents", (2, 3, 100, D), dtype)
