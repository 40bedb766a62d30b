"""Grouped queries (arXiv 2305.13245): the H heads of queries share G heads of keys and values.

Query head h uses key head h // (H/G). `grouped_product` stacks the queries of a group as rows of
one matrix. Kernels that cannot do so copy keys and values, `repeat_kv`.
"""

from torch import Tensor


def grouped_product(x: Tensor, y: Tensor) -> Tensor:
    """x y for each head, without a copy of y: x (B, H, M, N), y (B, G, N, K) → (B, H, M, K)."""
    n_groups = y.shape[1]
    if x.shape[1] == n_groups:
        return x @ y
    return (x.unflatten(1, (n_groups, -1)).flatten(2, 3) @ y).reshape(*x.shape[:3], y.shape[-1])


def repeat_kv(x: Tensor, n_heads: int) -> Tensor:
    """Keys or values (B, G, T, D) → (B, H, T, D), copied for the query heads that use them.

    No copy if G is H.
    """
    return x if x.shape[1] == n_heads else x.repeat_interleave(n_heads // x.shape[1], 1)
