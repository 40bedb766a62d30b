"""Attention statistics against loops over pairs in float64, and for attention with known numbers."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from anlit import AnGPT, AttentionPattern, LogN, Plain, SlidingWindow
from anlit.nn.attention.attention import Attention
from anlit.nn.attention.observe import BinnedMeans, attention_layers, bin_edges, observe, observed
from anlit.nn.attention.statistics import Range, entropy, log_total, ranges, statistics, within
from anlit.nn.kernels.grouped_heads import repeat_kv
from tests.nn.attention.kernels import inputs, packed
from tests.nn.models.tiny import random_tokens, tiny

HEADS, WIDTH = 2, 8
INFINITY = float("inf")


def naive(
    row: list[float], position: int, first_key: int, spans: list[Range], latest: int
) -> dict[str, float]:
    """The statistics of a query at `position` with these logits of keys 0 … position."""
    visible = {position - j: math.exp(value) for j, value in enumerate(row) if value > -INFINITY}
    weights = {t: e / sum(visible.values()) for t, e in visible.items()}

    def entropy_of(chosen: list[float]) -> float:
        return (
            -sum(w / sum(chosen) * math.log(w / sum(chosen)) for w in chosen)
            if chosen
            else math.nan
        )

    inside = {span: [w for t, w in weights.items() if span.first <= t < span.end] for span in spans}
    return {
        "entropy": entropy_of([*weights.values()]),
        "inverse_largest_weight": 1 / max(weights.values()),
        "participation": sum(w * w for w in weights.values()),
        "attention_sink": weights.get(position - first_key, math.nan),
        f"weight_latest_{latest}": sum(w for t, w in weights.items() if t < latest),
        **{
            f"weight_{span}": sum(chosen) if chosen else math.nan for span, chosen in inside.items()
        },
        **{
            f"entropy_{span}": entropy_of(chosen)
            for span, chosen in inside.items()
            if span != (0, 1)
        },
    }


def masked_logits(n_queries: int, n_keys: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(2, H, Q, K) float64, causal; row 0 is two documents, the second from key 3.

    Row 1 has a window of 5 keys.
    """
    L = 2 * torch.randn(
        2,
        HEADS,
        n_queries,
        n_keys,
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )
    i, j = torch.arange(n_keys - n_queries, n_keys)[:, None], torch.arange(n_keys)
    causal = j <= i
    begins = torch.where(i[:, 0] >= 3, 3, 0)
    visible = torch.stack((causal & (j >= begins[:, None]), causal & (i - j < 5)))
    return L.masked_fill(~visible[:, None], -INFINITY), torch.stack(
        (begins, torch.zeros_like(begins))
    )


@pytest.mark.parametrize("n_queries", [13, 6, 1])
def test_every_statistic_is_the_loop_over_keys(n_queries) -> None:
    """NaN where a query sees no key of a range, or not its document's first key."""
    n_keys, spans = 13, [Range(0, 1), Range(1, 3), Range(3, 9), Range(9, 27)]
    L, first_keys = masked_logits(n_queries, n_keys)
    actual = statistics(L, first_keys, spans, latest=4)
    for b, h, query in np.ndindex(2, HEADS, n_queries):
        position = n_keys - n_queries + query
        expected = naive(
            L[b, h, query, : position + 1].tolist(), position, int(first_keys[b, query]), spans, 4
        )
        values = {name: value[b, h, query].item() for name, value in actual.items()}
        assert values == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_a_far_key_of_tiny_weight_is_not_absent() -> None:
    L = torch.tensor([[[[-200.0, -201.0, 0.0]]]])
    far, near = 1 / (1 + math.e), math.e / (1 + math.e)
    exact = -far * math.log(far) - near * math.log(near)
    assert entropy(within(L, Range(1, 3))).item() == pytest.approx(exact, rel=1e-5)
    assert log_total(L).item() == 0


def test_ranges_cover_every_distance_once() -> None:
    assert ranges(0) == [Range(0, 1)]
    assert ranges(99) == [Range(0, 1), Range(1, 10), Range(10, 100)]
    assert ranges(100)[-1] == Range(100, 1000)
    L = torch.randn(1, 2, 5, 40).masked_fill(
        torch.arange(40) > torch.arange(35, 40)[:, None], -INFINITY
    )
    totals = torch.stack([log_total(within(L, span)).exp().nan_to_num(0) for span in ranges(39)])
    torch.testing.assert_close(totals.sum(0), log_total(L).exp(), rtol=1e-5, atol=1e-5)


def test_a_compiled_model_is_observed_uncompiled_and_left_as_it_was() -> None:
    compiled = []
    model = tiny(AnGPT, attention=AttentionPattern([SlidingWindow(3), Plain()])).eval()
    for block in model.model.blocks:
        block.compile(backend=lambda graph, _: compiled.append(graph) or graph.forward)
    tokens = random_tokens(2, 16)
    with torch.no_grad():
        before = model(tokens)
        count = len(compiled)
        with observed(model, bin_edges(16), ranges(15)) as layers:
            torch.testing.assert_close(model(tokens), before)
        assert torch.equal(model(tokens), before)
    assert len(compiled) == count > 0
    first, second = (layer.means() for layer in layers)
    assert first["n"][0].tolist() == second["n"][0].tolist() == [1, 2.5, 5.5, 12]
    assert layers[0].counts().sum() == 2 * 2 * 16
    assert not any(layer._forward_pre_hooks for layer in attention_layers(model))


def test_statistics_of_shared_keys_are_those_of_copies() -> None:
    layer = Attention(LogN().for_layer(4, WIDTH, 0), "eager")
    q, k, v, _ = inputs(2, 4, 33, WIDTH, dtype=torch.float32, n_heads_kv=2)
    shared, copied = BinnedMeans(bin_edges(33)), BinnedMeans(bin_edges(33))
    for means, keys, values in ((shared, k, v), (copied, repeat_kv(k, 4), repeat_kv(v, 4))):
        observe(means, layer, q, keys, values, packed(2, 33, "documents"), [Range(1, 10)])
    torch.testing.assert_close(shared.means(), copied.means(), equal_nan=True)
