"""Attention statistics against loops over pairs in float64, and against known numbers."""

import math
from collections.abc import Callable
from typing import Any

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

HEADS = 2
WIDTH = 8
INFINITY = float("inf")


def naive_entropy(weights: list[float]) -> float:
    """The entropy, in nats, of weights divided by their sum; NaN without weights."""
    if not weights:
        return math.nan
    total = sum(weights)
    entropy = 0.0
    for weight in weights:
        share = weight / total
        entropy -= share * math.log(share)
    return entropy


def weights_within(weights: dict[int, float], span: Range) -> list[float]:
    return [weight for t, weight in weights.items() if span.first <= t < span.end]


def naive(
    row: list[float], position: int, first_key: int, spans: list[Range], latest: int
) -> dict[str, float]:
    """The statistics of a query at `position` with these logits of keys 0 … position."""
    total = sum(map(math.exp, row))
    weights = {}  # by distance, of visible keys
    for j, logit in enumerate(row):
        if logit > -INFINITY:
            weights[position - j] = math.exp(logit) / total
    all_weights = [*weights.values()]
    squares = [weight**2 for weight in all_weights]
    latest_weights = weights_within(weights, Range(0, latest))

    result = {
        "entropy": naive_entropy(all_weights),
        "inverse_largest_weight": 1 / max(all_weights),
        "participation": sum(squares),
        "attention_sink": weights.get(position - first_key, math.nan),
        f"weight_latest_{latest}": sum(latest_weights),
    }
    for span in spans:
        inside = weights_within(weights, span)
        result[f"weight_{span}"] = sum(inside) if inside else math.nan
        if span != (0, 1):
            result[f"entropy_{span}"] = naive_entropy(inside)
    return result


def masked_logits(n_queries: int, n_keys: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits (2, H, Q, K) in float64, and each query's first key, (2, Q). They are causal.

    Row 0 is two documents, the second from key 3. Row 1 has a window of 5 keys.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (2, HEADS, n_queries, n_keys)
    L = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    i = torch.arange(n_keys - n_queries, n_keys)[:, None]  # (Q, 1)
    j = torch.arange(n_keys)  # (K,)
    first_key = torch.where(i >= 3, 3, 0)  # (Q, 1), with documents
    is_causal = j <= i  # (Q, K)
    in_document = j >= first_key
    in_window = i - j < 5
    visible = torch.stack((is_causal & in_document, is_causal & in_window))  # (2, Q, K)
    first_keys = torch.stack((first_key, torch.zeros_like(first_key)))
    return L.masked_fill(~visible[:, None], -INFINITY), first_keys.squeeze(-1)


@pytest.mark.parametrize("n_queries", [13, 6, 1])
def test_every_statistic_is_the_loop_over_keys(n_queries) -> None:
    """NaN where a query sees no key of a range, or not its document's first key."""
    n_keys = 13
    spans = [Range(0, 1), Range(1, 3), Range(3, 9), Range(9, 27)]
    L, first_keys = masked_logits(n_queries, n_keys)

    actual = statistics(L, first_keys, spans, latest=4)

    for b, h, query in np.ndindex(2, HEADS, n_queries):
        position = n_keys - n_queries + query
        row = L[b, h, query, : position + 1].tolist()
        first_key = int(first_keys[b, query])
        expected = naive(row, position, first_key, spans, latest=4)
        values = {}
        for name, value in actual.items():
            values[name] = value[b, h, query].item()
        assert values == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_a_far_key_of_tiny_weight_is_not_absent() -> None:
    L = torch.tensor([[[[-200.0, -201.0, 0.0]]]])
    far = 1 / (1 + math.e)
    near = math.e / (1 + math.e)

    actual = entropy(within(L, Range(1, 3)))

    exact = -far * math.log(far) - near * math.log(near)
    assert actual.item() == pytest.approx(exact, rel=1e-5)
    assert log_total(L).item() == 0


def test_ranges_cover_every_distance_once() -> None:
    assert ranges(0) == [Range(0, 1)]
    assert ranges(99) == [Range(0, 1), Range(1, 10), Range(10, 100)]
    assert ranges(100)[-1] == Range(100, 1000)


def test_totals_of_all_ranges_add_up_to_the_total() -> None:
    is_later = torch.arange(40) > torch.arange(35, 40)[:, None]
    L = torch.randn(1, 2, 5, 40).masked_fill(is_later, -INFINITY)  # (B, H, Q, K)

    total = 0.0
    for span in ranges(39):
        total_of_range = log_total(within(L, span)).exp()
        total = total + total_of_range.nan_to_num(0)

    expected = log_total(L).exp()
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_compiled_model_is_observed_uncompiled_and_left_as_it_was() -> None:
    graphs = []

    def record_graph(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    pattern = AttentionPattern([SlidingWindow(3), Plain()])
    model = tiny(AnGPT, attention=pattern).eval()
    for block in model.model.blocks:
        block.compile(backend=record_graph)
    tokens = random_tokens(2, 16)
    logits_before = model(tokens)
    n_graphs = len(graphs)

    with observed(model, bin_edges(16), ranges(15)) as layers:
        during = model(tokens)
    after = model(tokens)

    torch.testing.assert_close(during, logits_before)
    assert torch.equal(after, logits_before)
    assert n_graphs > 0
    assert len(graphs) == n_graphs
    for layer in layers:
        mean_counts = layer.means()["n"][0]
        assert mean_counts.tolist() == [1, 2.5, 5.5, 12]
        assert layer.counts().sum() == 2 * 2 * 16
    for attention in attention_layers(model):
        assert not attention._forward_pre_hooks


def test_statistics_of_shared_keys_are_those_of_copies() -> None:
    layer = Attention(LogN().for_layer(4, WIDTH, 0), "eager")
    q, k, v, _ = inputs(2, 4, 33, WIDTH, n_heads_kv=2)
    documents = packed(2, 33, "documents")
    spans = [Range(1, 10)]
    copied_k = repeat_kv(k, 4)
    copied_v = repeat_kv(v, 4)
    shared = BinnedMeans(bin_edges(33))
    copied = BinnedMeans(bin_edges(33))

    observe(shared, layer, q, k, v, documents, spans)
    observe(copied, layer, q, copied_k, copied_v, documents, spans)

    torch.testing.assert_close(shared.means(), copied.means(), equal_nan=True)
