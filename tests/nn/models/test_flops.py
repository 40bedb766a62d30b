"""FLOPs per token against torch's own count of the operators that run."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import anlit
from anlit.nn.models import flops
from anlit.nn.models.flops import flops_per_token, mean_visible_keys

SHAPE = {"vocab_size": 96, "n_layers": 3, "d_model": 32, "n_heads": 2}
LENGTH = 64


@pytest.mark.parametrize(
    "shape", [{}, {"n_kv_heads": 1, "d_head": 24, "d_ff": 80, "attention_gate": "per_element"}]
)
@pytest.mark.parametrize("attention", ["Plain", "ScaleInvariant", "LogN", "ALiBi"])
@pytest.mark.parametrize("name", ["GPT", "NGPT", "AnGPT"])
@pytest.mark.covering(2)
def test_flops_are_those_of_the_products_that_run(
    name: str, attention: str, shape: dict, monkeypatch
) -> None:
    model = getattr(anlit, name)(
        **SHAPE, **shape, attention=getattr(anlit, attention)(), kernel="eager"
    ).model
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).sum().backward()
    # the eager kernel computes the masked logits too, so that every query has T keys
    monkeypatch.setattr(flops, "mean_visible_keys", lambda length, window: length)
    assert counter.get_total_flops() == 2 * LENGTH * flops_per_token(model, LENGTH)


@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_a_window_saves_what_it_hides(window: int) -> None:
    visible_keys = sum(min(i, window) for i in range(1, LENGTH + 1)) / LENGTH
    plain = anlit.GPT(**SHAPE, attention=anlit.Plain())
    windowed = anlit.GPT(**SHAPE, attention=anlit.SlidingWindow(window))

    saved = flops_per_token(plain.model, LENGTH) - flops_per_token(windowed.model, LENGTH)

    assert mean_visible_keys(LENGTH, window) == pytest.approx(visible_keys)
    assert saved == pytest.approx(12 * 3 * 32 * ((LENGTH + 1) / 2 - visible_keys))


@pytest.mark.parametrize("window", [None, 3])
def test_packed_documents_cost_what_they_cost_alone(window: int | None) -> None:
    attention = anlit.Plain() if window is None else anlit.SlidingWindow(window)
    model = anlit.NGPT(**SHAPE, attention=attention).model
    positions = torch.arange(8).repeat(1, 2)  # two documents of 8 tokens in a row

    packed = flops_per_token(model, 16, positions)

    assert packed == pytest.approx(flops_per_token(model, 8), rel=1e-12)
    assert packed < flops_per_token(model, 16)
