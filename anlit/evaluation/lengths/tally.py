"""Sums of the loss per sequence and range of positions, and means with standard errors.

A position counts from 0 in its sequence or document, so the token after position p is predicted from p + 1 tokens.
Range 0 is position 0, range k ≥ 1 the positions [2^(k−1), 2^k).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean loss in nats per counted token."""

    loss: float | None
    """None if there is no token."""
    standard_error: float | None
    """Over sequences, the units in which the corpus was sampled; None for fewer than two."""
    tokens: int


@dataclass(frozen=True)
class RangeLoss:
    """The loss at positions [first, end)."""

    first: int
    end: int
    estimate: Estimate


class Tally:
    """Sums of the loss and counts of the counted targets, of each sequence and range."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.n_ranges = int(range_of(np.array(length - 1))) + 1
        self._losses: list[Floats] = []
        self._tokens: list[Floats] = []

    def add(self, losses: Floats, counted: NDArray[np.bool_], positions: NDArray[np.int64]) -> None:
        """Add the losses of a batch, whether they count, and each token's position; all (B, T)."""
        rows, n = len(losses), self.n_ranges
        index = (np.arange(rows)[:, None] * n + range_of(positions)).ravel()
        for stored, weights in ((self._losses, np.where(counted, losses, 0.0)), (self._tokens, counted)):
            sums = np.bincount(index, weights.ravel().astype(np.float64), rows * n)
            stored.append(sums.astype(np.float64).reshape(rows, n))

    @property
    def losses(self) -> Floats:
        """Summed losses, (sequences, ranges)."""
        return np.concatenate(self._losses)

    @property
    def tokens(self) -> Floats:
        """Counted targets, (sequences, ranges)."""
        return np.concatenate(self._tokens)

    def ranges(self) -> list[RangeLoss]:
        """The mean loss of each range."""
        bounds = [(0, 1), *((2 ** (k - 1), min(2**k, self.length)) for k in range(1, self.n_ranges))]
        columns = zip(self.losses.T, self.tokens.T, strict=True)
        return [RangeLoss(*bound, estimate(*column)) for bound, column in zip(bounds, columns, strict=True)]


def range_of(positions: NDArray[Any]) -> NDArray[np.int64]:
    """0 for position 0, else ⌊log2 p⌋ + 1, the exponent of p as a floating-point number."""
    return np.frexp(positions.astype(np.float64))[1].astype(np.int64)


def estimate(losses: Floats, tokens: Floats) -> Estimate:
    """Ratio of summed loss to counted targets, with the standard error over the sequences that have targets.

    Args:
        losses: (sequences,) summed losses.
        tokens: (sequences,) counted targets.
    """
    losses, tokens = losses[tokens > 0], tokens[tokens > 0]
    n, total = len(tokens), float(tokens.sum())
    if n == 0:
        return Estimate(None, None, 0)
    mean = float(losses.sum()) / total
    spread = float(np.square(losses - mean * tokens).sum())
    return Estimate(mean, math.sqrt(n / (n - 1) * spread) / total if n > 1 else None, int(total))
