"""Medians with an interval that assumes no distribution, and products of ratios with theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import binom

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A median, or another estimate, with the interval that holds the true one with at least 95 % confidence."""

    median: float
    low: float
    high: float


def median_with_interval(values: Sequence[float]) -> Interval:
    """The median and the two of the sorted values between which the true one lies with at least 95 % confidence.

    The interval assumes no distribution: the number of values below the true median is binomial. With fewer than six
    values no two of them are far enough apart, and it reaches from the least to the greatest.
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    n = len(ordered)
    outside = max(0, int(binom.ppf((1 - CONFIDENCE) / 2, n, 0.5)) - 1)  # so many may lie outside at each end
    return Interval(float(np.median(ordered)), float(ordered[outside]), float(ordered[n - 1 - outside]))


def product(one: Interval, other: Interval) -> Interval:
    """The product of two independent positive estimates: their distances from it add up in squares, as logarithms."""
    below = math.hypot(math.log(one.median / one.low), math.log(other.median / other.low))
    above = math.hypot(math.log(one.high / one.median), math.log(other.high / other.median))
    estimate = one.median * other.median
    return Interval(estimate, estimate * math.exp(-below), estimate * math.exp(above))
