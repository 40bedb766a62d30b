"""Our own kernels by Triton's interpreter against the readable kernel in float64."""

import importlib
import math
from functools import partial
from typing import Any

import pytest
import torch

from anlit import ALiBi, Plain, ScaleInvariant, SlidingWindow
from anlit.nn.kernels import eager
from anlit.nn.kernels import triton as kernel
from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.triton import operator, tables
from anlit.nn.kernels.triton.blocks import PADDING
from anlit.nn.kernels.triton.operator import triton_attention
from tests.nn.attention import kernels
from tests.nn.attention.interpreter import use_interpreter
from tests.nn.attention.kernels import (
    MECHANISMS,
    ONE_COEFFICIENT,
    WIDTHS,
    WITHOUT_GAIN,
    assert_close,
    check,
    gradients,
    inputs,
    packed,
    slow_except,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch) -> None:
    """Triton decides at the import of a kernel who runs it."""
    if torch.cuda.is_available():
        pytest.skip("test_gpu.py does this on the GPU")
    use_interpreter(monkeypatch)


@kernels.kinds
@pytest.mark.parametrize("name", slow_except(WITHOUT_GAIN, ONE_COEFFICIENT))
@pytest.mark.covering(1)
def test_every_mechanism_is_the_reference(name, kind) -> None:
    n_full_blocks = 2 if kind == "window" else 1  # with two, a window leaves a whole block out
    n_more = 1 + sum(map(ord, name + kind)) % 15
    length = 16 * n_full_blocks + n_more
    n_rows = 2 if name == "alibi" else 1
    shape = (n_rows, 2, length, 16)

    check(kernel, name, kind, shape, torch.float32)


@kernels.dtypes
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.covering(1)
def test_every_width_and_dtype_is_the_reference(width, dtype) -> None:
    check(kernel, "scale-invariant", "dense", (1, 1, 19, width), dtype)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 65])
def test_every_length_is_the_reference(length) -> None:
    check(kernel, "scale-invariant", "dense", (1, 1, length, 8), torch.float32)


@pytest.mark.parametrize("name", ["straight", "alibi"])
def test_far_tiles_are_the_reference(name, monkeypatch) -> None:
    """Straight tables, and limits that make tiles of 16 × 16 far after a block, in float32."""
    monkeypatch.setattr(tables, "FIRST_LINE", 16)
    monkeypatch.setattr(tables, "LONGEST_WITHOUT_LINES", 0)
    monkeypatch.setattr(tables, "LARGEST_RISE", 1e3)
    monkeypatch.setitem(tables.TOLERANCES, torch.float32, 1e-3)
    far_starts = []

    def record_far_start(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        lines, far_start = tables.linear_tables(*arguments)
        far_starts.append(far_start.tolist())
        return lines, far_start

    monkeypatch.setattr(kernel, "linear_tables", record_far_start)

    check(kernel, name, "dense", (1, 2, 53, 16), torch.float32)

    assert far_starts == [[16, 16]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tau", "c"),
    [
        (1.0, 0.5),
        (10.0, 2.0),
        (10.0, 8.0),
        (100.0, 2.0),
        (1e4, 3.0),
    ],
)
def test_far_lines_are_the_tables_to_the_rounding_of_the_weights(tau, c, dtype) -> None:
    """Against a(t) and m(t) in float64, at every pair of every far tile, for |S| up to 8."""
    length = 16384
    width = 64
    mechanism = ScaleInvariant(tau, c).for_layer(1, width, 0)
    queries = torch.empty(1, 1, length, width, dtype=dtype)
    by_distance, _, _ = tables.make_tables(mechanism, queries)

    all_lines, far_start = tables.linear_tables(by_distance, width, dtype)

    latest_start = 2704 if dtype == torch.bfloat16 else 7520
    growth_with_c = math.sqrt(max(1.0, c / 2))
    assert int(far_start) <= latest_start * growth_with_c
    steps = torch.arange(1 - tables.FIRST_LINE, tables.FIRST_LINE, dtype=torch.float64)
    centres = torch.arange(int(far_start), length, tables.LINE_SPACING)
    rows = centres // tables.LINE_SPACING
    lines = all_lines[0, rows].double()
    gain_slope, gain, bias_slope, bias = lines.T[..., None]
    gains = math.sqrt(width) * (gain_slope * steps + gain)
    biases = bias_slope * steps + bias
    t = centres[:, None] + steps
    exact_gains = mechanism.distance_gain(t) / math.log(2)
    exact_biases = mechanism.distance_bias(t) / math.log(2)
    for score in (-8.0, 8.0):
        logit_error = score * (gains - exact_gains) + biases - exact_biases
        weight_error = 1 - torch.exp2(logit_error)
        assert weight_error.abs().max() <= torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("n_heads_kv", [1, 2])
def test_heads_in_groups_share_keys(n_heads_kv) -> None:
    tensors = inputs(1, 4, 21, 8, n_heads_kv=n_heads_kv)
    documents = packed(1, 21, "dense")
    mechanism = ALiBi().for_layer(4, 8, 0)
    attend_eagerly = kernels.repeated(eager.attend)

    actual = gradients(kernel.attend, mechanism, tensors, documents)

    expected = gradients(attend_eagerly, mechanism, tensors, documents)
    assert_close(actual, expected, torch.float32)


def test_any_strides_will_do() -> None:
    q, k, v, probe = inputs(1, 2, 19, 8)
    documents = packed(1, 19, "dense")
    fused = torch.stack((q, k, v), -1).unbind(-1)  # rows are not in one piece
    other_strides = [*fused, probe.contiguous()]

    actual = gradients(kernel.attend, ScaleInvariant(), other_strides, documents)

    expected = gradients(kernel.attend, ScaleInvariant(), [q, k, v, probe], documents)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class Launches:
    """Stands in for a kernel: launches it, and notes grids and the strides of tokens."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.grids: list[tuple[int, ...]] = []
        self.token_strides: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor) and argument.dim() == 4:
                self.token_strides.append(argument.stride(2))
        self.kernel[grid](*arguments, **constants)


@pytest.fixture
def launches(monkeypatch) -> list[Launches]:
    """What the three kernels were launched with."""
    records = []
    for name in ("forward", "backward_queries", "backward_keys"):
        module = importlib.import_module(f"anlit.nn.kernels.triton.{name}")
        records.append(Launches(getattr(module, name)))
        monkeypatch.setattr(module, name, records[-1])
    return records


@pytest.mark.parametrize("largest_axis", [1, 4, 5, 7])
def test_more_heads_than_an_axis_of_the_grid_holds_are_computed_alike(
    largest_axis, launches, monkeypatch
) -> None:
    """15 rows and heads: on 4 × 4 programs one is too many, on 3 × 5 and 5 × 3 none is."""
    tensors = inputs(5, 3, 19, 8)
    documents = packed(5, 19, "documents")
    mechanism = MECHANISMS["scale-invariant, c per layer"].for_layer(3, 8, 0)
    expected = gradients(kernel.attend, mechanism, tensors, documents)
    monkeypatch.setattr(operator, "LARGEST_AXIS", largest_axis)

    actual = gradients(kernel.attend, mechanism, tensors, documents)

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    for record in launches:
        usual_grid, split_grid = record.grids
        assert usual_grid == (2, 15, 1)
        assert split_grid[0] == 2, "tiles of a head follow each other, as before"
        assert split_grid[1] <= largest_axis
        assert 15 <= split_grid[1] * split_grid[2] < 15 + split_grid[2]


def test_an_axis_of_the_grid_has_at_most_what_cuda_allows() -> None:
    """Copying and needles have a million short rows and heads in a batch."""
    for n_rows in (1, 8191, 8192, 65_536, 1_000_003):
        q = torch.empty(1).expand(n_rows, 8, 16, 4)

        tiles, *axes = operator.grid(q, tokens_per_tile=16)

        assert tiles == 1
        assert max(axes) <= 65_535
        assert 0 <= math.prod(axes) - n_rows * 8 < axes[1]


def test_tokens_too_far_from_each_other_for_32_bits_are_copied(launches, monkeypatch) -> None:
    """As in a batch of which the tokens come first, (T, B, H, D)."""
    q, k, v, probe = inputs(2, 2, 19, 8)
    documents = packed(2, 19, "dense")
    expected = gradients(kernel.attend, ScaleInvariant(), [q, k, v, probe], documents)
    far_apart = [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (q, k, v, probe)]
    monkeypatch.setattr(operator, "LONGEST_STRIDE", 31)
    for record in launches:
        record.token_strides.clear()

    actual = gradients(kernel.attend, ScaleInvariant(), far_apart, documents)

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    for record in launches:
        assert far_apart[0].stride(2) == 32
        assert 8 in record.token_strides
        assert 32 not in record.token_strides


@pytest.mark.parametrize(
    ("kind", "reach"),
    [
        ("documents", 32),
        ("window", 16),
    ],
)
def test_blocks_out_of_sight_are_not_touched(kind, reach) -> None:
    """NaN in some blocks of keys or gradients does not reach results that see no such block."""
    T = 64
    if kind == "documents":
        mechanism = Plain().for_layer(1, 8, 0)
        ids = (torch.arange(T) >= 32).long()[None]
    else:
        mechanism = SlidingWindow(17).for_layer(1, 8, 0)
        ids = None
    documents = Documents(ids, T, torch.device("cpu"))
    q, k, v, probe = inputs(1, 1, T, 8)

    k_with_nan = k.clone()
    v_with_nan = v.clone()
    k_with_nan[:, :, :32] = torch.nan
    v_with_nan[:, :, :32] = torch.nan
    tensors = [q, k_with_nan, v_with_nan, probe]
    result = gradients(kernel.attend, mechanism, tensors, documents)
    for name in ("output", "q"):
        assert result[name][:, :, T - reach :].isfinite().all()
        assert result[name][:, :, :32].isnan().all()

    probe_with_nan = probe.clone()
    probe_with_nan[:, :, 48:] = torch.nan
    tensors = [q, k, v, probe_with_nan]
    result = gradients(kernel.attend, mechanism, tensors, documents)
    for name in ("k", "v"):
        assert result[name][:, :, :reach].isfinite().all()
        assert result[name][:, :, 48:].isnan().all()


def test_the_operator_is_as_torch_wants_it() -> None:
    q, k, v, _ = inputs(1, 1, 5, 4)
    for x in (q, k, v):
        x.requires_grad_()
    coefficient = torch.ones(1, requires_grad=True)
    tables = torch.rand(1, 5 + PADDING, 2)
    tangents = torch.rand(1, 5 + PADDING, 1)
    no_lines = None, None
    starts, ends = packed(1, 5, "documents").bounds
    window = 3
    tests = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_static",
    )

    arguments = (q, k, v, coefficient, tables, tangents, *no_lines, starts, ends, window)
    torch.library.opcheck(triton_attention, arguments, test_utils=tests)
