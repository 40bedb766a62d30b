"""Means over seeds, medians with an interval that assumes no distribution, products of ratios, and fitted powers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, linregress
from scipy.stats import t as student

from anlit.reporting.table import NONE

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Summary:
    """Values of the seeds, None for a seed without one; the mean needs all of them."""

    values: tuple[float | None, ...]

    @property
    def mean(self) -> float | None:
        known = [value for value in self.values if value is not None]
        return float(np.mean(known)) if known and len(known) == len(self.values) else None

    @property
    def sd(self) -> float | None:
        """Sample standard deviation (n − 1) over seeds; None for one seed or without a mean."""
        known = [value for value in self.values if value is not None]
        return float(np.std(known, ddof=1)) if self.mean is not None and len(known) > 1 else None


def mean_sd(summary: Summary, digits: int) -> str:
    """`3.2101 ± 0.0042`; without ± for one seed, – without a mean, words if it is not finite."""
    if summary.mean is None:
        return NONE
    if not math.isfinite(summary.mean):
        return "not finite"
    sd = f" ± {summary.sd:,.{digits}f}" if summary.sd is not None else ""
    return f"{summary.mean:,.{digits}f}{sd}"


class Interval(NamedTuple):
    """A median, or another estimate, with an interval of at least 95 % confidence."""

    median: float
    low: float
    high: float


def median_with_interval(values: Sequence[float]) -> Interval:
    """The median, and an interval between two of the sorted values with at least 95 % confidence.

    The interval assumes no distribution: the number of values below the true median is binomial. With fewer than six
    values it cannot reach 95 %, and it is from the smallest to the largest value.
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    n = len(ordered)
    outside = max(0, int(binom.ppf((1 - CONFIDENCE) / 2, n, 0.5)) - 1)  # values outside at each end
    return Interval(float(np.median(ordered)), float(ordered[outside]), float(ordered[n - 1 - outside]))


class PowerLaw(NamedTuple):
    """y = constant · x^exponent."""

    constant: float
    exponent: Interval

    def __call__(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        fitted: NDArray[np.float64] = self.constant * np.asarray(x, dtype=float) ** self.exponent.median
        return fitted


def power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw | None:
    """Least squares of log y over log x, with the exponent's 95 % interval; None for fewer than three different x."""
    if len(set(x)) < 3:
        return None
    line = linregress(np.log(x), np.log(y))
    half = float(student.ppf((1 + CONFIDENCE) / 2, len(x) - 2) * line.stderr)
    slope = float(line.slope)
    return PowerLaw(float(np.exp(line.intercept)), Interval(slope, slope - half, slope + half))


def product(one: Interval, other: Interval) -> Interval:
    """The product of two independent positive estimates; squares of the intervals' logarithmic widths add up."""
    below = math.hypot(math.log(one.median / one.low), math.log(other.median / other.low))
    above = math.hypot(math.log(one.high / one.median), math.log(other.high / other.median))
    estimate = one.median * other.median
    return Interval(estimate, estimate * math.exp(-below), estimate * math.exp(above))
