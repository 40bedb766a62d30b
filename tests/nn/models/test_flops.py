"""FLOPs per token against torch's own count of the operators that run."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from anlit import GPT, NGPT, ALiBi, LogN, Plain, ScaleInvariant, SlidingWindow
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.nn.models import flops
from anlit.nn.models.flops import flops_per_token, mean_visible_keys
from anlit.training.language_model import LanguageModel
from tests.nn.models.tiny import architectures

SHAPE = {"vocab_size": 96, "n_layers": 3, "d_model": 32, "n_heads": 2}
LENGTH = 64


OTHER_SHAPE = {"n_kv_heads": 1, "d_head": 24, "d_ff": 80, "attention_gate": "per_element"}


@pytest.mark.parametrize("shape", [{}, OTHER_SHAPE], ids=["", "other shape"])
@pytest.mark.parametrize("attention", [Plain, ScaleInvariant, LogN, ALiBi])
@architectures
@pytest.mark.covering(2)
def test_flops_are_those_of_the_products_that_run(
    architecture: type[LanguageModel], attention: type[Mechanism], shape: dict, monkeypatch
) -> None:
    model = architecture(**SHAPE, **shape, attention=attention(), kernel="eager").model
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    # The eager kernel computes the masked logits too, so that every query has T keys.
    monkeypatch.setattr(flops, "mean_visible_keys", lambda length, window: length)
    expected = 2 * LENGTH * flops_per_token(model, LENGTH)

    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).sum().backward()

    assert counter.get_total_flops() == expected


@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_a_window_saves_what_it_hides(window: int) -> None:
    numbers_of_keys = [min(i, window) for i in range(1, LENGTH + 1)]
    visible_keys = sum(numbers_of_keys) / LENGTH
    hidden_keys = (LENGTH + 1) / 2 - visible_keys
    plain = GPT(**SHAPE, attention=Plain()).model
    windowed = GPT(**SHAPE, attention=SlidingWindow(window)).model

    saved = flops_per_token(plain, LENGTH) - flops_per_token(windowed, LENGTH)

    assert mean_visible_keys(LENGTH, window) == pytest.approx(visible_keys)
    # 2 for q·k and 2 for the average of v, 3 times in training, in 3 layers of width 32
    assert saved == pytest.approx(12 * 3 * 32 * hidden_keys)


@pytest.mark.parametrize("attention", [Plain(), SlidingWindow(3)], ids=["plain", "window"])
def test_packed_documents_cost_what_they_cost_alone(attention: Mechanism) -> None:
    model = NGPT(**SHAPE, attention=attention).model
    positions = torch.arange(8).repeat(1, 2)  # two documents of 8 tokens in a row

    packed = flops_per_token(model, 16, positions)

    alone = flops_per_token(model, 8)
    as_a_document = flops_per_token(model, 16)
    assert packed == pytest.approx(alone, rel=1e-12)
    assert packed < as_a_document
