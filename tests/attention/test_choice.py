"""Which back end computes what, and what is refused when."""

from functools import partial
from typing import Any

import pytest
import torch

from anlit import GPT, ALiBi, LogBias, LogN, Plain, ScaleInvariant, SlidingWindow
from anlit.attention.backends import (
    BACKENDS,
    candidates,
    choose,
    default_backend,
    flash,
    flex,
    triton,
)
from anlit.attention.selection import mechanism_name
from anlit.errors import UserError
from tests.attention.examples import SHIPPED
from tests.attention.kernels import MECHANISMS
from tests.models.tiny import random_tokens, tiny

Q = torch.randn(2, 3, 5, 16)


class OnDevice:
    """What a back end asks of queries on a device that need not be here."""

    def __init__(
        self, kind: str, dtype: torch.dtype = torch.bfloat16, width: int = 64, length: int = 1
    ) -> None:
        self.device, self.dtype, self.shape = (
            torch.device(kind),
            dtype,
            torch.Size((1, 3, length, width)),
        )
        self.requires_grad, self.is_cuda, self.element_size = (
            True,
            kind == "cuda",
            lambda: dtype.itemsize,
        )


on_cuda: Any = partial(OnDevice, "cuda")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash, "HAS_PACKAGE", False)


@pytest.mark.usefixtures("h200")
def test_without_a_trial_auto_takes_what_needs_no_mask_of_all_pairs_on_a_cpu_and_what_does_no_harm_on_a_gpu() -> (
    None
):
    """Training in bfloat16 on a CPU takes eager up to a block of its queries. Sizing asks the same without queries."""
    for name, mechanism in SHIPPED.items():
        by_distance = any(
            part in name for part in ("scale-invariant", "log bias", "alibi", "window", "pattern")
        )
        mechanism = mechanism.for_layer(3, 64, 0)
        usual = "eager" if mechanism.scales_with_distance else "sdpa"
        default = "blockwise" if by_distance else "sdpa"
        assert choose("auto", mechanism, Q) == default
        assert choose("auto", mechanism, Q, dropout=0.1) == usual
        short = Q.bfloat16().requires_grad_()
        long = torch.empty(1, 3, 513, 16, dtype=torch.bfloat16, requires_grad=True)
        assert (
            choose("auto", mechanism, short)
            == choose("auto", mechanism, short, dropout=0.1)
            == "eager"
        )
        assert (
            choose("auto", mechanism, long) == choose("auto", mechanism, short.detach()) == default
        )
        assert choose("auto", mechanism, on_cuda()) == default_backend(mechanism, "cuda") == usual
    assert choose("flash", Plain(), on_cuda()) == "flash"


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", SHIPPED)
def test_at_most_three_are_tried_and_eager_only_where_it_is_short(
    name, is_packed, monkeypatch
) -> None:
    """Flex is left out where its learned tables have another kernel."""
    layer = SHIPPED[name].for_layer(3, 64, 0)
    short, long = (candidates(layer, on_cuda(length=length), is_packed) for length in (2048, 8192))
    assert 1 <= len(long) <= len(short) <= 3
    assert "eager" not in long
    assert candidates(layer, Q, is_packed) == []
    if layer.scales_with_distance:
        assert short == (
            ["triton", "eager"] if "c per layer" in name else ["triton", "flex", "eager"]
        )
        monkeypatch.setattr(triton, "IS_INSTALLED", False)
        assert candidates(layer, on_cuda(), is_packed) == ["flex", "eager"]


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, True), ({"generation": 10}, True), ({"generation": 8}, False), ({"has_package": False}, False),
    ({"learned": True}, False), ({"q": on_cuda(torch.float32)}, False), ({"q": Q.half()}, False),
])  # fmt: skip
def test_flex_runs_on_flash_attention_4_where_that_can_compute_it(
    changes, expected, monkeypatch
) -> None:
    """On CPU FLASH would be ignored without a word, and without the package it raises."""
    monkeypatch.setattr(flex, "HAS_FLASH_4", changes.get("has_package", True))
    monkeypatch.setattr(flex, "gpu_generation", lambda: changes.get("generation", 9))
    table = torch.zeros(64, requires_grad=changes.get("learned", False))
    assert flex.runs_on_flash_4(changes.get("q", on_cuda()), table, None) is expected


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(("backend", "mechanism", "q", "reason"), [
    ("sdpa", ScaleInvariant(), None, "a(t)"), ("flash", SlidingWindow(3, ScaleInvariant()), None, "a(t)"),
    ("flash", LogBias(), None, "of all biases m(t)"),
    ("flash", SlidingWindow(3, ALiBi()), None, "pip install flash-attn"), ("flash", Plain(), Q, "CUDA device"),
    ("flash", Plain(), on_cuda(torch.float32), "not float32"), ("flash", Plain(), on_cuda(width=36), "not 36"),
    ("flash", Plain(), on_cuda(width=264), "not 264"),
    ("flash", SlidingWindow(3, LogN()), on_cuda(torch.float16, 80), None), ("flex", ScaleInvariant(), Q, None),
    ("flex", ScaleInvariant(), on_cuda(), None),
    ("flex", ScaleInvariant(), Q.clone().requires_grad_(), "no backward pass on CPU"),
    ("flex", Plain(), Q.double(), "float64"), ("flex", Plain(), Q[..., :8], "not 8"),
    ("flex", Plain(), OnDevice("mps"), "mps"),
    ("triton", MECHANISMS["of one's own"].for_layer(2, 8, 0), None, "is learned, and not by one Coefficient alone"),
    ("triton", MECHANISMS["straight"].for_layer(2, 8, 0), None, None),
    ("triton", Plain(), on_cuda(width=264), "at most 256 wide, not 264"),
    ("triton", Plain(), on_cuda(torch.float64), "not float64"),
    ("blockwise", ScaleInvariant(), on_cuda(), "made for CPUs, and the model is on cuda"),
])  # fmt: skip
def test_what_a_back_end_cannot_compute_has_a_reason(backend, mechanism, q, reason) -> None:
    actual = BACKENDS[backend].unsupported_reason(mechanism, q)
    assert actual is None if reason is None else reason in actual


def test_reasons_that_lie_with_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    for backend in (flash, triton):
        assert "compute capability" in backend.unsupported_reason(Plain(), on_cuda())
    monkeypatch.setattr(flash, "HAS_PACKAGE", True)
    reasons = [flash.unsupported_reason(m) for m in (ALiBi(), SlidingWindow(3, ALiBi()), LogBias())]
    assert reasons == [None, None, "of all biases m(t), flash attention can only compute ALiBi's"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton.unsupported_reason(ScaleInvariant(), Q) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "on a GPU, not on cpu" in triton.unsupported_reason(Plain(), Q)
    monkeypatch.setattr(triton, "IS_INSTALLED", False)
    assert "triton is not installed" in triton.unsupported_reason(Plain())


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"backend": "sdpa", "attention": ScaleInvariant()}, "'sdpa' cannot do attention ScaleInv.*choose.*eager"),
    *[({"backend": name, "dropout": 0.1}, "drop.*; choose auto or sdpa, eager")
      for name in ("flash", "flex", "triton", "blockwise")],
    ({"backend": "flush"}, r"backend='flush' is unknown: choose auto, .*sdpa, eager"),
])  # fmt: skip
def test_what_no_device_can_do_is_refused_when_the_model_is_built(settings, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        tiny(GPT, **settings)


def test_what_this_device_cannot_do_is_refused_at_the_first_forward_pass() -> None:
    said = r"'flash' cannot do attention Plain: .*CUDA.*choose auto or .*wise, sdpa, eager"
    with pytest.raises(UserError, match=said):
        tiny(GPT, backend="flash")(random_tokens(2, 16))


def test_the_name_of_a_mechanism_tells_its_window_and_what_is_learned() -> None:
    inner = ScaleInvariant(tau=3.0, learned="globally").for_layer(2, 8, 0)
    assert mechanism_name(ScaleInvariant(tau=4.0)) == "ScaleInvariant"
    assert (
        mechanism_name(SlidingWindow(9, inner))
        == "SlidingWindow(window 9, ScaleInvariant(decay globally))"
    )
