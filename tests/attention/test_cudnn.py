"""cuDNN's attention, with a pretended operator on the CPU and, on a GPU, against eager."""

import types

import pytest
import torch

from anlit import ALiBi, LogN, Plain, ScaleInvariant, SlidingWindow
from anlit.attention.backends import cudnn
from anlit.attention.documents import Documents
from anlit.errors import UserError
from tests.attention.kernels import check, packed


@pytest.mark.parametrize("name", ["plain", "log n"])
def test_it_is_eager_in_float64(name, monkeypatch) -> None:
    schema = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema
    positional = [one.name for one in schema.arguments if not one.kwarg_only]

    def attention(*arguments):
        given = dict(zip(positional, arguments, strict=False))
        assert given["attn_bias"] is None
        assert given["compute_log_sumexp"] is given["is_causal"] is True
        assert given["dropout_p"] == 0
        q, k, v = (given[part] for part in ("query", "key", "value"))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), *[None] * 8

    monkeypatch.setattr(cudnn, "_aten", types.SimpleNamespace(_scaled_dot_product_cudnn_attention=attention))
    check(cudnn, name, "dense", (2, 2, 13, 8), torch.float32)


def test_documents_never_become_a_mask(monkeypatch) -> None:
    monkeypatch.setattr(Documents, "visible", None)
    q = torch.zeros(1, 2, 13, 8)
    with pytest.raises(UserError, match="cannot mask documents; choose backend flash"):
        cudnn.attend(q, q, q, Plain(), packed(1, 13, "documents"), 0.0)


def test_reasons(monkeypatch) -> None:
    for mechanism in (ScaleInvariant(), ALiBi(), SlidingWindow(4)):
        assert "by distance or has a window" in cudnn.reason_against(mechanism)
    assert cudnn.reason_against(LogN()) is None
    assert "dropout is 0.1" in cudnn.reason_against(Plain(), None, 0.1)
    assert "on cpu" in cudnn.reason_against(Plain(), torch.zeros(1, 1, 4, 8))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    settings = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "shape": (1, 2, 4, 64)}
    assert cudnn.reason_against(Plain(), types.SimpleNamespace(**settings)) is None
    for change, words in [({"shape": (1, 2, 4, 256)}, "not 256"), ({"dtype": torch.float32}, "not float32")]:
        assert words in cudnn.reason_against(Plain(), types.SimpleNamespace(**settings | change))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "not the same twice" in cudnn.reason_against(Plain(), types.SimpleNamespace(**settings))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 80, 128])
def test_on_cuda_it_is_eager(width, dtype) -> None:
    check(cudnn, "log n", "dense", (2, 3, 777, width), dtype, "cuda")
