"""The kernel that computes a mechanism, and mechanisms that are refused."""

from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anlit import GPT, ALiBi, LogBias, LogN, Plain, ScaleInvariant, SlidingWindow
from anlit.errors import UserError
from anlit.nn.attention import attention
from anlit.nn.attention.attention import Attention
from anlit.nn.kernels import (
    GPU_KERNELS,
    KERNELS,
    default_kernel,
    fallback_warning,
    flash,
    flex,
    row_of,
    triton,
    unsupported_reason,
)
from anlit.nn.mechanisms.mechanism import mechanism_name
from tests.nn.attention.examples import SHIPPED
from tests.nn.attention.kernels import MECHANISMS
from tests.nn.models.tiny import random_tokens, tiny

Q = torch.randn(2, 3, 5, 16)


class OnDevice:
    """What a kernel asks of queries on a device that need not be here."""

    def __init__(
        self, kind: str, dtype: torch.dtype = torch.bfloat16, width: int = 64, length: int = 1
    ) -> None:
        self.device = torch.device(kind)
        self.dtype = dtype
        self.shape = torch.Size((1, 3, length, width))
        self.requires_grad = True
        self.is_cuda = kind == "cuda"

    def element_size(self) -> int:
        return self.dtype.itemsize


on_cuda: Any = partial(OnDevice, "cuda")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash, "HAS_PACKAGE", False)


@pytest.mark.parametrize("name", SHIPPED)
def test_on_a_cpu_auto_takes_what_needs_no_mask_of_all_pairs(name: str) -> None:
    """Training in bfloat16 takes eager up to a block of its queries.

    Sizing asks the same without queries.
    """
    layer = SHIPPED[name].for_layer(3, 64, 0)
    usual = "blockwise" if layer.depends_on_distance else "sdpa"
    with_dropout = "eager" if layer.scales_with_distance else "sdpa"
    short = Q.bfloat16().requires_grad_()
    long = torch.empty(1, 3, 513, 16, dtype=torch.bfloat16, requires_grad=True)

    for is_packed in (False, True):
        assert default_kernel(layer, "cpu", is_packed) == usual
        assert default_kernel(layer, "cpu", is_packed, Q) == usual
        assert default_kernel(layer, "cpu", is_packed, Q, dropout=0.1) == with_dropout
        assert default_kernel(layer, "cpu", is_packed, short) == "eager"
        assert default_kernel(layer, "cpu", is_packed, short.detach()) == usual
        assert default_kernel(layer, "cpu", is_packed, long) == usual


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("is_packed", [False, True], ids=["whole rows", "packed"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", ("sdpa", "flash")),
        ("log n", ("sdpa", "flash")),
        ("sqrt log n", ("sdpa", "flash")),
        ("window", ("flash", "flash")),
        ("window, log n", ("flash", "flash")),
        ("alibi", ("triton", "triton")),
        ("log bias", ("triton", "triton")),
        ("scale-invariant", ("triton", "triton")),
        ("scale-invariant, c per layer", ("triton", "triton")),
        ("window, scale-invariant", ("triton", "triton")),
    ],
)
def test_on_an_h200_in_bfloat16_auto_takes_the_kernel_that_was_measured_fastest(
    name: str, expected: tuple[str, str], is_packed: bool
) -> None:
    layer = SHIPPED[name].for_layer(3, 64, 0)

    kernel = default_kernel(layer, "cuda", is_packed, on_cuda())

    assert kernel == expected[is_packed]


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("name", "is_packed", "dropout", "excluded", "expected"),
    [
        ("plain", True, 0.0, ["flash"], "triton"),
        ("window", False, 0.0, ["flash"], "triton"),
        ("plain", False, 0.1, ["sdpa"], "eager"),
        ("a user's", True, 0.0, ["flex"], "sdpa"),
        ("a user's", True, 0.0, ["flex", "sdpa"], "eager"),
    ],
)
def test_auto_leaves_out_kernels_for_which_a_batch_has_too_many_sequences(
    name, is_packed, dropout, excluded, expected
) -> None:
    layer = MECHANISMS[name].for_layer(3, 64, 0)
    q = on_cuda()

    kernel = default_kernel(layer, "cuda", is_packed, q, dropout, excluded=excluded)
    warning = fallback_warning(kernel, layer, is_packed, q, dropout)

    assert kernel == expected
    assert (warning is not None) == (expected in ("sdpa", "eager"))
    assert warning is None or "None" not in warning


CAPABILITIES = [(7, 5), (8, 0), (9, 0), (10, 0)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
WIDTHS = [8, 64, 80, 128, 256, 320]


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("has_triton", [True, False], ids=["triton", "no triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.covering(2)
def test_every_mechanism_packing_and_width_has_a_kernel_that_can_compute_it(
    name, dtype, has_triton, capability, monkeypatch
) -> None:
    """The kernel that auto takes can compute the mechanism. A costly kernel gives a warning."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton, "IS_INSTALLED", has_triton)
    for is_packed, width, dropout in product((False, True), WIDTHS, (0.0, 0.1)):
        layer = MECHANISMS[name].for_layer(2, width, 0)
        q = on_cuda(dtype, width)

        kernel = default_kernel(layer, "cuda", is_packed, q, dropout)
        warning = fallback_warning(kernel, layer, is_packed, q, dropout)

        assert unsupported_reason(kernel, layer, q, dropout) is None
        preferred = GPU_KERNELS[row_of(layer, is_packed)]
        n_faster = preferred.index(kernel)
        for faster in preferred[:n_faster]:
            assert unsupported_reason(faster, layer, q, dropout) is not None
        is_costly = kernel == "eager" or (kernel == "sdpa" and kernel != preferred[0])
        assert (warning is not None) == is_costly


@pytest.mark.usefixtures("h200")
def test_a_costly_kernel_is_told_once_with_its_reason_and_what_it_costs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "IS_INSTALLED", False)
    monkeypatch.setattr(flex, "unsupported_reason", lambda mechanism, q=None: "no")
    attention.warn_once.cache_clear()

    for _ in range(2):
        layer = Attention(ScaleInvariant().for_layer(3, 64, 0), "auto")
        assert layer.kernel_for(on_cuda(), is_packed=True) == "eager"

    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith("attention ScaleInvariant runs on 'eager' on this GPU, which writes")
    assert "than 'triton': triton is not installed: " in message


@pytest.mark.usefixtures("h200")
@torch.no_grad()
def test_without_gradients_auto_takes_the_kernel_of_training() -> None:
    """The kernel is chosen before the first block, where gradients are off."""
    layer = LEARNED_BIAS  # two learned numbers, of which our kernels have no gradient

    assert default_kernel(layer, "cuda", False, on_cuda()) == "flex"


def test_a_kernel_is_chosen_again_where_documents_are_packed() -> None:
    layer = Attention(Plain().for_layer(3, 16, 0), "auto")
    layer.kernel_for(Q, is_packed=False)
    layer.kernel_for(Q, is_packed=True)
    layer.kernel_for(Q[..., :3, :], is_packed=True)

    records = attention.kernels_in_use([layer])

    choices = [(record["length"], record["packed"]) for record in records]
    assert choices == [(5, False), (5, True), (3, True)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"generation": 10}, True),
        ({"generation": 8}, False),
        ({"has_package": False}, False),
        ({"learned": True}, False),
        ({"q": on_cuda(torch.float32)}, False),
        ({"q": Q.half()}, False),
    ],
)
def test_flex_runs_on_flash_attention_4_where_that_can_compute_it(
    changes, expected, monkeypatch
) -> None:
    """On CPU FLASH would be ignored without a word, and without the package it raises."""
    usual = {"has_package": True, "generation": 9, "learned": False, "q": on_cuda()}
    case = SimpleNamespace(**usual | changes)
    monkeypatch.setattr(flex, "HAS_FLASH_4", case.has_package)
    monkeypatch.setattr(flex, "gpu_generation", lambda: case.generation)
    table = torch.zeros(64, requires_grad=case.learned)

    assert flex.runs_on_flash_4(case.q, table, None) is expected


LEARNED_BIAS = MECHANISMS["a user's"].for_layer(2, 8, 0)
STRAIGHT = MECHANISMS["straight"].for_layer(2, 8, 0)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("kernel", "mechanism", "q", "reason"),
    [
        ("sdpa", ScaleInvariant(), None, "a(t)"),
        ("flash", SlidingWindow(3, ScaleInvariant()), None, "a(t)"),
        ("flash", LogBias(), None, "of all biases m(t)"),
        ("flash", SlidingWindow(3, ALiBi()), None, "pip install flash-attn"),
        ("flash", Plain(), Q, "CUDA device"),
        ("flash", Plain(), on_cuda(torch.float32), "not float32"),
        ("flash", Plain(), on_cuda(width=36), "not 36"),
        ("flash", Plain(), on_cuda(width=264), "not 264"),
        ("flash", SlidingWindow(3, LogN()), on_cuda(torch.float16, 80), None),
        ("flex", ScaleInvariant(), Q, None),
        ("flex", ScaleInvariant(), on_cuda(), None),
        ("flex", ScaleInvariant(), Q.clone().requires_grad_(), "no backward pass on CPU"),
        ("flex", Plain(), Q.double(), "float64"),
        ("flex", Plain(), Q[..., :8], "not 8"),
        ("flex", Plain(), OnDevice("mps"), "mps"),
        ("triton", LEARNED_BIAS, None, "is learned, and not by one Coefficient alone"),
        ("triton", STRAIGHT, None, None),
        ("triton", Plain(), on_cuda(width=264), "at most 256 wide, not 264"),
        ("triton", Plain(), on_cuda(torch.float64), "not float64"),
        ("blockwise", ScaleInvariant(), on_cuda(), "made for CPUs, and the model is on cuda"),
    ],
)
def test_what_a_kernel_cannot_compute_has_a_reason(kernel, mechanism, q, reason) -> None:
    actual = KERNELS[kernel].unsupported_reason(mechanism, q)

    if reason is None:
        assert actual is None
    else:
        assert reason in actual


@pytest.mark.parametrize("kernel", [flash, triton], ids=["flash", "triton"])
def test_an_old_gpu_is_a_reason(kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))

    assert "compute capability" in kernel.unsupported_reason(Plain(), on_cuda())


def imagine_gpu(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


@pytest.mark.parametrize(
    ("capability", "width", "n_stages"),
    [((8, 9), 256, 1), ((12, 0), 256, 1), ((8, 9), 128, 2), ((8, 0), 256, 2), ((9, 0), 256, 2)],
)
def test_flex_with_tables_fits_wide_heads_on_workstations(
    capability, width, n_stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two stages it takes 156 kB, and a block has 101,376 bytes."""
    imagine_gpu(capability, monkeypatch)

    assert flex.table_options(on_cuda(width=width))["num_stages"] == n_stages


@pytest.mark.parametrize(
    ("capability", "width", "trains", "is_refused"),
    [
        ((8, 9), 208, True, True),
        ((12, 0), 224, True, True),
        ((8, 9), 208, False, False),
        ((8, 9), 192, True, False),
        ((8, 9), 256, True, False),
        ((8, 0), 208, True, False),
        ((9, 0), 208, True, False),
    ],
)
def test_flash_trains_no_heads_of_208_on_workstations(
    capability, width, trains, is_refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch would raise in the backward pass (sdp_utils.cpp, mha_bwd)."""
    imagine_gpu(capability, monkeypatch)
    q = on_cuda(width=width)
    q.requires_grad = trains

    reason = flash.unsupported_reason(Plain(), q)

    assert (reason is not None) == is_refused
    assert reason is None or "no gradient at head width" in reason


def test_the_package_of_flash_computes_the_bias_of_alibi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "HAS_PACKAGE", True)

    assert flash.unsupported_reason(ALiBi()) is None
    assert flash.unsupported_reason(SlidingWindow(3, ALiBi())) is None
    assert "can only compute ALiBi's" in flash.unsupported_reason(LogBias())


def test_our_kernels_need_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "on a GPU, not on cpu" in triton.unsupported_reason(Plain(), Q)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton.unsupported_reason(ScaleInvariant(), Q) is None


def test_our_kernels_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "IS_INSTALLED", False)

    assert "triton is not installed" in triton.unsupported_reason(Plain())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"kernel": "sdpa", "attention": ScaleInvariant()},
            "'sdpa' cannot do attention ScaleInv.*choose auto",
        ),
        ({"kernel": "flush"}, r"kernel='flush' is unknown: choose auto, .*sdpa, eager"),
    ],
)
def test_what_no_device_can_do_is_refused_when_the_model_is_built(settings, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        tiny(GPT, **settings)


@pytest.mark.parametrize("kernel", ["flash", "flex", "triton", "blockwise"])
def test_dropout_is_refused_by_kernels_without_it(kernel: str) -> None:
    with pytest.raises(UserError, match=r"drop.*; choose auto"):
        tiny(GPT, kernel=kernel, dropout=0.1)


def test_what_this_device_cannot_do_is_refused_at_the_first_forward_pass() -> None:
    model = tiny(GPT, kernel="flash")

    message = r"'flash' cannot do attention Plain: .*CUDA.*choose auto"
    with pytest.raises(UserError, match=message):
        model(random_tokens(2, 16))


def test_the_name_of_a_mechanism_tells_its_window_and_what_is_learned() -> None:
    inner = ScaleInvariant(tau=3.0, learned="globally").for_layer(2, 8, 0)
    plain_name = mechanism_name(ScaleInvariant(tau=4.0))
    nested_name = mechanism_name(SlidingWindow(9, inner))

    assert plain_name == "ScaleInvariant"
    assert nested_name == "SlidingWindow(window 9, ScaleInvariant(decay globally))"
