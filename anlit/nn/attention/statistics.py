"""Statistics of attention weights, per query, from the logits.

`logits` are (B, H, Q, K), −∞ where a key is not visible. The last query is at the last key. So key
j has the distance t = (K − Q + i) − j from query i. Weights are w = softmax(logits). Results are
(B, H, Q), in float32 at least. They are NaN where a query sees no key of the range.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from anlit.nn.kernels.grouped_heads import grouped_product
from anlit.nn.layers.precision import wide_dtype


class Range(NamedTuple):
    """The distances first ≤ t < end, in tokens."""

    first: int
    end: int

    def __str__(self) -> str:
        return f"{self.first}_to_{self.end}"


def ranges(longest: int) -> list[Range]:
    """[0, 1), the query's token, then [1, 10), [10, 100) … up to a distance of `longest`."""
    spans = [Range(0, 1)]
    while spans[-1].end <= longest:
        spans.append(Range(spans[-1].end, 10 * spans[-1].end))
    return spans


def within(logits: Tensor, span: Range) -> Tensor:
    """The logits of keys at distances in `span`, −∞ for others.

    Keys outside all queries' ranges are cut off.
    """
    n_queries, n_keys = logits.shape[-2:]
    first_key = max(0, n_keys - n_queries - span.end + 1)
    end_key = max(0, n_keys - span.first)
    queries = torch.arange(n_keys - n_queries, n_keys, device=logits.device)
    keys = torch.arange(first_key, end_key, device=logits.device)
    distances = queries[:, None] - keys
    is_outside = (distances < span.first) | (distances >= span.end)
    return logits[..., first_key:end_key].masked_fill(is_outside, -math.inf)


def log_total(logits: Tensor) -> Tensor:
    """ln Σ e^L, the logarithm of the softmax's denominator."""
    total = logits.to(wide_dtype(logits)).logsumexp(-1)
    return total.masked_fill(total == -math.inf, math.nan)


def entropy(logits: Tensor) -> Tensor:
    """−Σ w ln w in nats, from 0 (one key has all the weight) to ln K (all keys have the same)."""
    weights = _softmax(logits)
    if not logits.shape[-1]:
        return weights.new_full(weights.shape[:-1], math.nan)
    return torch.special.entr(weights).sum(-1)


def squared_average(logits: Tensor, v: Tensor) -> Tensor:
    """‖Σ_j w_j v_j‖² / mean ‖v_j‖² over the visible keys, v (B, G, K, D).

    It is Σ w² for orthogonal values of equal norm.
    """
    v = v.to(wide_dtype(v))
    is_visible = (logits > -math.inf).to(v.dtype)
    squared_norms = v.square().sum(-1, keepdim=True)
    mean = grouped_product(is_visible, squared_norms)[..., 0] / is_visible.sum(-1)
    average = grouped_product(_softmax(logits).to(v.dtype), v)
    return average.square().sum(-1) / mean


def statistics(
    logits: Tensor, first_keys: Tensor, spans: list[Range], latest: int = 100
) -> dict[str, Tensor]:
    """All statistics of logits (B, H, Q, K) by name, each (B, H, Q).

    `inverse_largest_weight` is 1/w_max, from 1 to K: about how many keys share the attention.
    `participation` is Σ w², from 1/K to 1: the squared norm of the average of K orthonormal values.
    `attention_sink` is the weight on `first_keys`, (B or 1, Q) int64, where each query's document
    begins. `weight_latest_100` is the weight on the last 100 tokens, with the query's, as in [SI].
    `weight_1_to_10` and `entropy_1_to_10` are for distances [1, 10), over the keys that the query
    sees.
    """
    total = log_total(logits)
    first_key = logits.gather(-1, first_keys[:, None, :, None].expand(*logits.shape[:-1], 1))
    values = {
        "entropy": entropy(logits),
        "inverse_largest_weight": (total - logits.to(total.dtype).amax(-1)).exp(),
        "participation": _softmax(logits).square().sum(-1),
        "attention_sink": (log_total(first_key) - total).exp(),
        f"weight_latest_{latest}": (log_total(within(logits, Range(0, latest))) - total).exp(),
    }
    for span in spans:
        span_logits = within(logits, span)
        values[f"weight_{span}"] = (log_total(span_logits) - total).exp()
        if span.end - span.first > 1:
            # The weights of the range, scaled to a sum of 1 ([SI], figure 2)
            values[f"entropy_{span}"] = entropy(span_logits)
    return values


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1, dtype=wide_dtype(logits))
