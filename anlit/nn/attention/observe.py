"""Statistics of a model's attention layers on real text, averaged over queries.

A hook before each `Attention` computes the logits once more, a few queries at a time. So any kernel
can be observed. Memory grows with the length, not with its square. The model does not change.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from anlit.nn.attention.attention import Attention, attention_layers
from anlit.nn.attention.statistics import Range, squared_average, statistics
from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.eager import QUERIES_PER_BLOCK, logits_of_queries
from anlit.nn.layers.precision import wide_dtype

LOGITS_AT_A_TIME = 1 << 24
"""The largest number of logits, over sequences and heads. That is 64 MiB in float32, and a few
copies exist."""

FEWEST_QUERIES = 16
"""Queries at a time, even if their logits are more than `LOGITS_AT_A_TIME`."""


def bin_edges(longest: int) -> list[int]:
    """1, 2, 4 …: the bins [2^k, 2^{k+1}) of context lengths up to `longest`.

    If `longest` is 2^k, it joins the last.
    """
    n_bins = max(1, (longest - 1).bit_length())
    return [2**power for power in range(n_bins)]


class BinnedMeans:
    """Means over queries, for each head and bin of the context length n. Bins begin at `edges`.

    The last has no end.
    """

    def __init__(self, edges: list[int]) -> None:
        self.edges = edges
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}

    def add(self, values: dict[str, Tensor], n: Tensor) -> None:
        """Add each statistic's values, (B, H, Q), of queries with context lengths n, (B, Q).

        Skip NaN.
        """
        edges = torch.tensor(self.edges, device=n.device)
        bins = torch.bucketize(n.flatten(), edges, right=True) - 1
        for name, value in values.items():
            by_head = value.double().transpose(0, 1).flatten(1)  # (H, B·Q)
            is_finite = by_head.isfinite()
            if name not in self._sums:
                zeros = by_head.new_zeros(len(by_head), len(self.edges))
                self._sums[name] = zeros
                self._counts[name] = zeros.clone()
            self._sums[name].index_add_(1, bins, by_head.where(is_finite, 0.0))
            self._counts[name].index_add_(1, bins, is_finite.double())

    def means(self) -> dict[str, Tensor]:
        """The mean of each statistic by name, (H, bins) float64. NaN in a bin without queries."""
        return {name: total / self._counts[name] for name, total in self._sums.items()}

    def counts(self) -> Tensor:
        """How many queries are in each bin, (H, bins)."""
        return self._counts["n"]


@contextmanager
def observed(model: nn.Module, edges: list[int], spans: list[Range]) -> Iterator[list[BinnedMeans]]:
    """Record all forward passes of `model` inside this context.

    Yields the means of each layer, first to last.

    A compiled model runs uncompiled here and stays compiled afterwards.

    Args:
        model: The model.
        edges: The bins of a query's context length n, its position in its document, from 1.
        spans: Ranges of distances.
    """
    means = {layer: BinnedMeans(edges) for layer in attention_layers(model)}

    def observe_layer(layer: Any, arguments: tuple[Any, ...]) -> None:
        q, k, v, documents = arguments
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            observe(means[layer], layer, q, k, v, documents, spans)

    with ExitStack() as hooks, torch.compiler.set_stance("force_eager"):
        for layer in means:
            hooks.enter_context(layer.register_forward_pre_hook(observe_layer))
        yield [*means.values()]


def queries_at_a_time(q: Tensor) -> int:
    """The number of queries (B, H, T, D) whose logits fit into the memory chosen here."""
    n_sequences, n_heads, length, _ = q.shape
    n_queries = LOGITS_AT_A_TIME // (n_sequences * n_heads * length)
    return min(QUERIES_PER_BLOCK, max(FEWEST_QUERIES, n_queries))


def observe(
    record: BinnedMeans,
    layer: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    spans: list[Range],
) -> None:
    """Add the statistics of one layer's queries; q, k, v as `Attention.forward` gets them."""
    n_sequences, n_heads, length, _ = q.shape
    q = q.to(wide_dtype(q))
    k = k.to(wide_dtype(k))
    v = v.to(wide_dtype(v))
    index = torch.arange(length, device=q.device)[None]
    begins = index - (index if documents.positions is None else documents.positions)
    step = queries_at_a_time(q)
    for first in range(0, length, step):
        end = min(first + step, length)
        logits = logits_of_queries(q, k, layer.mechanism, documents, first, end)
        values = statistics(logits, begins[:, first:end], spans)
        values["squared_average"] = squared_average(logits, v[..., :end, :])
        n = (index + 1 - begins)[:, first:end].expand(n_sequences, -1)
        values["n"] = n[:, None].expand(-1, n_heads, -1)
        record.add(values, n)
