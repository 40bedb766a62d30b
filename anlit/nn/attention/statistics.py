"""Statistics of attention weights, per query, from the logits.

`logits` are (B, H, Q, K), −∞ where a key is not visible. The last query is at the last key, so key j is at the distance
t = (K − Q + i) − j from query i. Weights are w = softmax(logits). Results are (B, H, Q), in float32 at least; NaN where
a query sees none of the keys in question.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from anlit.nn.kernels.grouped_heads import grouped_product


class Range(NamedTuple):
    """The distances first ≤ t < end, in tokens."""

    first: int
    end: int

    def __str__(self) -> str:
        return f"{self.first}_to_{self.end}"


def ranges(longest: int) -> list[Range]:
    """[0, 1), the query's own token, then [1, 10), [10, 100) … up to a distance of `longest`."""
    spans = [Range(0, 1)]
    while spans[-1].end <= longest:
        spans.append(Range(spans[-1].end, 10 * spans[-1].end))
    return spans


def within(logits: Tensor, span: Range) -> Tensor:
    """The logits of keys at distances in `span`, −∞ for others; keys that are in no query's range are cut off."""
    n_queries, n_keys = logits.shape[-2:]
    low, high = max(0, n_keys - n_queries - span.end + 1), max(0, n_keys - span.first)
    queries = torch.arange(n_keys - n_queries, n_keys, device=logits.device)
    distances = queries[:, None] - torch.arange(low, high, device=logits.device)
    return logits[..., low:high].masked_fill(
        (distances < span.first) | (distances >= span.end), -math.inf
    )


def log_total(logits: Tensor) -> Tensor:
    """ln Σ e^L, the logarithm of the softmax's denominator."""
    total = logits.to(_wide(logits)).logsumexp(-1)
    return total.masked_fill(total == -math.inf, math.nan)


def entropy(logits: Tensor) -> Tensor:
    """−Σ w ln w in nats, from 0 (one key has all the weight) to ln K (every key has the same)."""
    weights = _softmax(logits)
    return (
        torch.special.entr(weights).sum(-1)
        if logits.shape[-1]
        else weights.new_full(weights.shape[:-1], math.nan)
    )


def squared_average(logits: Tensor, v: Tensor) -> Tensor:
    """‖Σ_j w_j v_j‖² / mean ‖v_j‖² over the visible keys, v (B, G, K, D): Σ w² for orthogonal values of equal norm."""
    v = v.to(_wide(v))
    visible = (logits > -math.inf).to(v.dtype)
    mean = grouped_product(visible, v.square().sum(-1, keepdim=True))[..., 0] / visible.sum(-1)
    return grouped_product(_softmax(logits).to(v.dtype), v).square().sum(-1) / mean


def statistics(
    logits: Tensor, first_keys: Tensor, spans: list[Range], latest: int = 100
) -> dict[str, Tensor]:
    """All statistics of logits (B, H, Q, K) by name, each (B, H, Q).

    `inverse_largest_weight` is 1/w_max, from 1 to K: about how many keys share the attention. `participation` is Σ w²,
    from 1/K to 1: the squared norm of the average of K orthonormal values.
    `weight_1_to_10` and `entropy_1_to_10` are those of distances [1, 10); of a range that a query sees in part, the
    visible part counts. `weight_latest_100` is that on the last 100 tokens, the query's own included, as in [SI].
    `attention_sink` is the weight on `first_keys`, (B or 1, Q) int64, where each query's document begins.
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
        values[f"weight_{span}"] = (log_total(within(logits, span)) - total).exp()
        if span.end - span.first > 1:
            values[f"entropy_{span}"] = entropy(
                within(logits, span)
            )  # their sum is 1 there ([SI], figure 2)
    return values


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1, dtype=_wide(logits))
