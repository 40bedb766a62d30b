"""Which back end computes what, and what is refused when."""

import pytest
import torch
from torch import Tensor

from anlit import GPT, ALiBi, LogBias, LogN, Plain, ScaleInvariant, SlidingWindow
from anlit.attention.backends import CANDIDATES, candidates, check, choose, default_backend, flash, flex, sdpa, triton
from anlit.attention.selection import form_of
from anlit.attention.trial import own_copy
from anlit.errors import UserError
from tests.attention.examples import SHIPPED
from tests.models.tiny import random_tokens, tiny

Q = torch.randn(2, 3, 5, 16)


class OnDevice:
    """What a back end asks of queries on a device that need not be here."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.bfloat16, width: int = 64) -> None:
        self.device, self.dtype, self.shape = torch.device(kind), dtype, torch.Size((1, 3, 1, width))
        self.requires_grad, self.is_cuda = True, kind == "cuda"

    def element_size(self) -> int:
        return self.dtype.itemsize


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash, "HAS_PACKAGE", False)


def on_cuda(dtype: torch.dtype = torch.bfloat16, width: int = 64) -> Tensor:
    return OnDevice("cuda", dtype, width)  # type: ignore[return-value]


@pytest.mark.parametrize("name", SHIPPED)
def test_on_cpu_auto_takes_without_a_trial_what_needs_no_mask_of_all_pairs(name: str) -> None:
    by_distance = any(part in name for part in ("scale-invariant", "log bias", "alibi", "window", "pattern"))
    assert choose("auto", SHIPPED[name], Q) == ("blockwise" if by_distance else "sdpa")
    usual = "eager" if SHIPPED[name].scales_with_distance else "sdpa"
    assert choose("auto", SHIPPED[name], Q, dropout=0.1) == usual


@pytest.mark.usefixtures("h200")
def test_auto_takes_without_a_trial_no_kernel_that_may_do_harm() -> None:
    assert choose("auto", Plain(), on_cuda()) == "sdpa"
    assert choose("auto", ALiBi(), on_cuda()) == "sdpa"
    assert choose("auto", ScaleInvariant(), on_cuda()) == "eager"
    assert choose("flash", Plain(), on_cuda()) == "flash"


def of_length(length: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    q = OnDevice("cuda", dtype)
    q.shape = torch.Size((1, 3, length, 64))
    return q  # type: ignore[return-value]


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", SHIPPED)
def test_at_most_three_are_tried_and_eager_only_where_it_is_short(name, is_packed, dtype) -> None:
    layer = SHIPPED[name].for_layer(3, 64, 0)
    short, long = (candidates(layer, of_length(length, dtype), is_packed) for length in (2048, 8192))
    assert 1 <= len(long) <= len(short) <= 3
    assert "eager" not in long
    assert candidates(layer, Q, is_packed) == {}
    if layer.scales_with_distance:
        assert [*short] == (["triton", "eager"] if "c per layer" in name else ["triton", "flex", "eager"])
    assert {each for names in CANDIDATES.values() for each in names} == {"sdpa", "flash", "flex", "triton", "eager"}


@pytest.mark.usefixtures("h200")
def test_flex_is_left_out_where_its_learned_tables_have_another_kernel(monkeypatch) -> None:
    learned = ScaleInvariant(learned="per_head").for_layer(3, 64, 0)
    assert [*candidates(learned, of_length(8192), True)] == ["triton"]
    monkeypatch.setattr(triton, "IS_INSTALLED", False)
    assert [*candidates(learned, of_length(8192), True)] == ["flex"]
    assert "flex" in candidates(LogN().for_layer(3, 64, 0), of_length(8192), True)  # its tables are not learned


def test_flex_runs_on_flash_attention_4_where_that_can_compute_it(monkeypatch) -> None:
    """On CPU FLASH would be ignored without a word, and without the package it raises."""
    q, table = of_length(64), torch.zeros(64)
    for has_package, generation, expected in ((True, 9, True), (True, 10, True), (True, 8, False), (False, 9, False)):
        monkeypatch.setattr(flex, "HAS_FLASH_4", has_package)
        monkeypatch.setattr(flex, "gpu_generation", lambda generation=generation: generation)
        assert flex.runs_on_flash_4(q, table, None) is expected
    monkeypatch.setattr(flex, "HAS_FLASH_4", True)
    monkeypatch.setattr(flex, "gpu_generation", lambda: 9)
    assert not flex.runs_on_flash_4(q, table.clone().requires_grad_(), None)
    assert not flex.runs_on_flash_4(of_length(64, torch.float32), None, None)
    assert not flex.runs_on_flash_4(Q.half(), None, None)


@pytest.mark.usefixtures("h200")
def test_what_flash_attention_refuses() -> None:
    assert "a(t)" in str(flash.unsupported_reason(ScaleInvariant()))
    assert "a(t)" in str(flash.unsupported_reason(SlidingWindow(3, ScaleInvariant())))
    assert "m(t)" in str(flash.unsupported_reason(LogBias()))
    for mechanism in (ALiBi(), SlidingWindow(3, ALiBi())):
        assert "pip install flash-attn" in str(flash.unsupported_reason(mechanism))
    assert "dropout is 0.1" in str(flash.unsupported_reason(Plain(), None, 0.1))
    assert "CUDA device" in str(flash.unsupported_reason(Plain(), Q))
    assert "float32" in str(flash.unsupported_reason(Plain(), on_cuda(torch.float32)))
    for width in (36, 264):
        assert f"not {width}" in str(flash.unsupported_reason(Plain(), on_cuda(width=width)))
    assert flash.unsupported_reason(SlidingWindow(3, LogN()), on_cuda(torch.float16, 80)) is None


def test_flash_attention_refuses_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability" in str(flash.unsupported_reason(Plain(), on_cuda()))


def test_with_its_package_flash_attention_takes_alibi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "HAS_PACKAGE", True)
    assert flash.unsupported_reason(ALiBi()) is None
    assert flash.unsupported_reason(SlidingWindow(3, ALiBi())) is None
    assert "m(t)" in str(flash.unsupported_reason(LogBias()))


def test_what_flex_refuses() -> None:
    assert flex.unsupported_reason(ScaleInvariant(), Q) is None
    assert flex.unsupported_reason(ScaleInvariant(), on_cuda()) is None
    assert "backward" in str(flex.unsupported_reason(ScaleInvariant(), Q.clone().requires_grad_()))
    assert "float64" in str(flex.unsupported_reason(Plain(), Q.double()))
    assert "not 8" in str(flex.unsupported_reason(Plain(), Q[..., :8]))
    assert "mps" in str(flex.unsupported_reason(Plain(), OnDevice("mps")))  # type: ignore[arg-type]
    assert "dropout is 0.1" in str(flex.unsupported_reason(Plain(), None, 0.1))


def test_what_no_device_can_do_is_refused_when_the_model_is_built() -> None:
    for name in ("sdpa", "flash"):
        sentence = rf"backend='{name}' cannot do attention ScaleInvariant.*choose auto or .*eager"
        with pytest.raises(ValueError, match=sentence):
            check(name, ScaleInvariant())
        with pytest.raises(UserError, match=sentence):
            tiny(GPT, attention=ScaleInvariant(), backend=name)
    with pytest.raises(UserError, match=r"dropout is 0\.1; choose auto or sdpa, eager"):
        tiny(GPT, backend="flash", dropout=0.1)


def test_what_this_device_cannot_do_is_refused_at_the_first_forward_pass() -> None:
    model = tiny(GPT, backend="flash")
    with pytest.raises(
        UserError, match=r"'flash' cannot do attention Plain: .*CUDA.*choose auto or blockwise, sdpa, eager"
    ):
        model(random_tokens(2, 16))
    model = tiny(GPT, backend="flex", n_heads=2)
    with pytest.raises(UserError, match="no backward pass on CPU"):
        model(random_tokens(2, 16))


def test_an_unknown_back_end_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"backend='flush' is unknown: choose auto, .*sdpa, eager"):
        check("flush", Plain())
    with pytest.raises(UserError, match=r"backend='flush' is unknown: choose auto, .*sdpa, eager"):
        tiny(GPT, backend="flush")


def test_the_choice_follows_device_precision_and_need_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.dtype, bool]] = []

    def unsupported_reason(mechanism, q=None, dropout=0.0) -> str | None:
        if q is not None:
            assert q.shape[1] == 2
            assert q.shape[3] == 16
            asked.append((q.dtype, q.requires_grad))
        return None

    monkeypatch.setattr(sdpa, "unsupported_reason", unsupported_reason)
    model = tiny(GPT, n_layers=1)
    tokens = random_tokens(2, 16)
    for _ in range(2):
        model(tokens)
        with torch.no_grad():
            model(tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(tokens)
    assert asked == [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)]


def test_sizing_asks_for_the_default_of_a_device_that_is_not_here() -> None:
    assert default_backend(Plain(), "cuda") == "sdpa"
    assert default_backend(ScaleInvariant(), "cuda") == "eager"
    assert default_backend(ScaleInvariant(), "cpu") == "blockwise"


def test_the_form_of_a_mechanism_tells_its_window_and_what_is_learned() -> None:
    forms = {
        form_of(mechanism.for_layer(2, 8, 0))
        for learned in ("never", "globally", "per_layer", "per_head")
        for mechanism in (ScaleInvariant(learned=learned), SlidingWindow(9, ScaleInvariant(learned=learned)))
    }
    assert len(forms) == 8
    assert form_of(ScaleInvariant(tau=3.0)) == form_of(ScaleInvariant(tau=4.0)) == "ScaleInvariant"
    assert form_of(SlidingWindow(9, ALiBi())) == "SlidingWindow(window 9, ALiBi)"


def test_a_copy_shares_no_coefficient_with_the_model() -> None:
    template = ScaleInvariant(learned="globally", c=1.5)
    layer = template.for_layer(2, 8, 0)
    copied = own_copy(layer)
    (coefficient,) = copied.parameters()
    assert coefficient.item() == 1.5
    assert coefficient is not next(template.parameters())
    assert form_of(copied) == form_of(layer)
