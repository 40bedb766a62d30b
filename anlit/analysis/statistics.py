"""Statistics over seeds, and the convergence speed-up (arXiv 2505.22014) as every report defines it.

    speed-up of B over A = tokens at which A first has its own final validation loss / tokens at which B first has it

- A curve first has a loss where it first is at or below it, linear between two validation points. It is not smoothed: a
  later rise does not undo a crossing.
- Nothing is extrapolated. A run that never gets there has no speed-up. One that was there at its first validation has
  at least the speed-up that is given.
- Runs are paired on the seeds (of initial weights and data order) that both configurations have. Each pair has one
  value, with the final loss of its own run of A.
- The speed-up is the geometric mean of the pairs, with the 95 % t-interval of the logarithm. If a pair has no value,
  there is no mean: a mean over the others would be too good. The report then says "k of n seeds".
- Without a common seed each run of B is compared with A's mean curve, and the report notes it.

In wall-clock it is the same times the paired ratio of steps, see `anlit.analysis.wall_clock`.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import scipy  # loads scipy.stats, which takes half a second, where it is first used
from numpy.typing import NDArray

from anlit.reporting.table import NONE
from anlit.runs.folders import Curve
from anlit.runs.groups import mean_curve

CONFIDENCE = 0.95
NO_SPREAD = 1e-9
"""Values with a smaller relative spread differ by rounding only, which no test can judge."""
SeededCurves = Sequence[tuple[Hashable, Curve]]
"""Seeds and validation curve (without NaN) of each run of a configuration."""


@dataclass(frozen=True)
class Summary:
    """Values of the seeds, None for a seed without one; the mean needs all of them."""

    values: Sequence[float | None]

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
    below = scipy.special.bdtr(np.arange(n), n, 0.5)  # probability of at most 0, 1 … values below the true median
    outside = max(0, int(np.sum(below < (1 - CONFIDENCE) / 2)) - 1)  # values outside at each end
    return Interval(float(np.median(ordered)), float(ordered[outside]), float(ordered[n - 1 - outside]))


def product(a: Interval, b: Interval) -> Interval:
    """The product of two independent positive estimates; squares of the intervals' logarithmic widths add up."""
    below = math.hypot(math.log(a.median / a.low), math.log(b.median / b.low))
    above = math.hypot(math.log(a.high / a.median), math.log(b.high / b.median))
    estimate = a.median * b.median
    return Interval(estimate, estimate * math.exp(-below), estimate * math.exp(above))


class PowerLaw(NamedTuple):
    """y = constant · x^exponent."""

    constant: float
    exponent: Interval

    def __call__(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(self.constant * np.asarray(x, dtype=float) ** self.exponent.median)


def power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw | None:
    """Least squares of log y over log x, with the exponent's 95 % interval; None for fewer than three different x."""
    if len(set(x)) < 3:
        return None
    line = scipy.stats.linregress(np.log(x), np.log(y))
    half = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, len(x) - 2) * line.stderr)
    slope = float(line.slope)
    return PowerLaw(float(np.exp(line.intercept)), Interval(slope, slope - half, slope + half))


@dataclass(frozen=True)
class Test:
    """A difference of means with its 95 % interval; `n` seeds of ours and of theirs.

    `p` is two-sided: the probability of so large a difference between seeds of one normal distribution.
    """

    method: str
    n: tuple[int, int]
    difference: float
    low: float
    high: float
    p: float


def difference(ours: Mapping[Hashable, float], theirs: Mapping[Hashable, float]) -> Test | None:
    """Ours minus theirs, values by seed: a paired t-test where both have the same seeds, Welch's t-test otherwise.

    None with fewer than two seeds, or without any spread.
    """
    a, b = np.array(list(ours.values())), np.array(list(theirs.values()))
    if set(ours) == set(theirs):
        return _one_sample(a - np.array([theirs[seed] for seed in ours]), "paired t-test")
    if min(len(a), len(b)) < 2 or max(np.ptp(a), np.ptp(b)) < NO_SPREAD * abs(a.mean()):
        return None
    return _test(scipy.stats.ttest_ind(a, b, equal_var=False), "Welch's t-test", (len(a), len(b)), a.mean() - b.mean())


def ratio(values: Sequence[float]) -> Test | None:
    """Is a ratio, one value per seed, other than 1? A t-test of its logarithm; the mean is the geometric one."""
    test = _one_sample(np.log(values), "t-test of the logarithm")
    if test is None:
        return None
    mean, low, high = (math.exp(value) for value in (test.difference, test.low, test.high))
    return replace(test, difference=mean, low=low, high=high)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for their number (Holm 1979)."""
    known = sorted((value, place) for place, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (value, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * value))
        corrected[place] = largest
    return corrected


def _one_sample(values: NDArray[np.float64], method: str) -> Test | None:
    if len(values) < 2 or np.ptp(values) < NO_SPREAD * max(1.0, np.abs(values).max()) or not np.isfinite(values).all():
        return None
    return _test(scipy.stats.ttest_1samp(values, 0.0), method, (len(values), len(values)), values.mean())


def _test(result: Any, method: str, n: tuple[int, int], mean: float) -> Test:
    low, high = result.confidence_interval(CONFIDENCE)
    return Test(method, n, float(mean), float(low), float(high), float(result.pvalue))


@dataclass(frozen=True)
class SpeedUp:
    """A speed-up in tokens.

    Args:
        values: One for each pair of seeds, None where the run never has the loss.
        bound: A run had the loss at its first validation, so the speed-up is at least this.
        paired: The seeds were compared in pairs, not with the baseline's mean curve.
    """

    values: tuple[float | None, ...]
    bound: bool = False
    paired: bool = True

    @property
    def mean(self) -> float | None:
        """The geometric mean; None unless every pair has a value."""
        known = [math.log(value) for value in self.values if value is not None]
        return math.exp(sum(known) / len(known)) if known and len(known) == len(self.values) else None

    @property
    def test(self) -> Test | None:
        """The t-test of the logarithm against 0 with its interval; None without a mean or with fewer than two pairs."""
        return ratio([value for value in self.values if value is not None]) if self.mean is not None else None

    @property
    def words(self) -> str:
        """`1.40 (1.31 … 1.50)`, `1.40` for one pair, `2 of 3 seeds` or `not reached`."""
        if self.mean is None:
            reached = sum(value is not None for value in self.values)
            return f"{reached} of {len(self.values)} seeds" if reached else "not reached"
        interval = f" ({self.test.low:.2f} … {self.test.high:.2f})" if self.test else ""
        return f"{'≥ ' if self.bound else ''}{self.mean:.2f}{interval}"


def tokens_to_loss(curve: Curve, loss: float) -> float | None:
    """Training tokens at which `curve` first is at or below `loss`; None if it never is."""
    below = np.flatnonzero(curve.loss <= loss)
    if len(below) == 0:
        return None
    i = int(below[0])
    if i == 0:
        return float(curve.tokens[0])
    part = (curve.loss[i - 1] - loss) / (curve.loss[i - 1] - curve.loss[i])
    return float(curve.tokens[i - 1] + part * (curve.tokens[i] - curve.tokens[i - 1]))


def speed_up(baseline: SeededCurves, others: SeededCurves) -> SpeedUp:
    """The speed-up of the runs `others` over those of `baseline`."""
    partners = dict(baseline)
    pairs = [(partners[seeds], curve) for seeds, curve in others if seeds in partners]
    paired = bool(pairs)
    if not pairs:
        mean = mean_curve([curve for _, curve in baseline])[0]
        pairs = [(mean, curve) for _, curve in others]
    values, bound = [], False
    for ours, theirs in pairs:
        target = float(ours.loss[-1])
        cost, own = tokens_to_loss(theirs, target), tokens_to_loss(ours, target)
        values.append(own / cost if own and cost else None)
        bound |= bool(theirs.loss[0] < target)
    return SpeedUp(tuple(values), bound, paired)
