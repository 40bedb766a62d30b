"""Statistics over seeds, and the convergence speed-up (arXiv 2505.22014) as every report defines it.

    speed-up of B over A = tokens at which A first has its own final validation loss / tokens at which B first has it

Curves are linear between two validation points, never smoothed or extrapolated. Runs are paired on the seeds (of
initial weights and data order) that both have; without a common one each run of B is compared with A's mean curve. The
speed-up is the geometric mean of the pairs. It needs all of them: a mean over those that get there is too good.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import scipy  # loads its parts where they are first used: scipy.stats takes half a second
from numpy.typing import NDArray

from anlit.reporting.table import NONE
from anlit.reporting.text import minus
from anlit.runs.folders import Curve
from anlit.runs.groups import mean_curve

CONFIDENCE = 0.95
NO_SPREAD = 1e-9
"""Values with a smaller relative spread differ by rounding only, which no test can judge."""
LOG_TEST = "t-test of the logarithm"
SeededCurves = Sequence[tuple[Hashable, Curve | None]]
"""Seeds and validation curve (without NaN) of each run of a configuration; None for a run that failed."""
Losses = Mapping[Hashable, float | None]
"""Final loss by seed; None for a run that failed."""


@dataclass(frozen=True)
class Summary:
    """Values of the seeds, None for a seed without one; the mean needs all of them."""

    values: Sequence[float | None]

    @property
    def mean(self) -> float | None:
        return (
            float(np.mean(np.array(self.values, float)))
            if self.values and None not in self.values
            else None
        )

    @property
    def sd(self) -> float | None:
        """Sample standard deviation (n − 1) over seeds; None for one seed or without a mean."""
        known = self.mean is not None and len(self.values) > 1
        return float(np.std(np.array(self.values, float), ddof=1)) if known else None


def mean_sd(summary: Summary, digits: int) -> str:
    """`3.2101 ± 0.0042`; without ± for one seed, `of_seeds` without a mean, words if it is not finite."""
    if summary.mean is None:
        return of_seeds(summary.values)
    if not math.isfinite(summary.mean):
        return "not finite"
    return f"{summary.mean:,.{digits}f}" + (
        f" ± {summary.sd:,.{digits}f}" if summary.sd is not None else ""
    )


def of_seeds(values: Sequence[float | None], none: str = NONE) -> str:
    """`2 of 3 seeds`, those that have a value; `none` if none has one."""
    known = sum(value is not None for value in values)
    return f"{known} of {len(values)} seeds" if known else none


class Interval(NamedTuple):
    """A median, or another estimate, with an interval of at least 95 % confidence, NaN where there is none."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        interval = "" if math.isnan(self.low) else f" ({self.low:.2f} … {self.high:.2f})"
        return f"{self.median:.2f}{interval}"


def median_with_interval(values: Sequence[float]) -> Interval:
    """The median, and an interval between two of the sorted values with at least 95 % confidence.

    The number of values below the true median is binomial, whatever their distribution. Fewer than six values cannot
    reach 95 %: NaN for both ends.
    """
    found: Any = scipy.stats.quantile_test(
        np.asarray(values, dtype=float), p=0.5
    ).confidence_interval(CONFIDENCE)
    return Interval(float(np.median(values)), float(found.low), float(found.high))


def product(a: Interval, b: Interval) -> Interval:
    """The product of two independent positive estimates; squares of the intervals' logarithmic widths add up."""
    below = math.hypot(math.log(a.median / a.low), math.log(b.median / b.low))
    above = math.hypot(math.log(a.high / a.median), math.log(b.high / b.median))
    estimate = a.median * b.median
    return Interval(estimate, estimate * math.exp(-below), estimate * math.exp(above))


def power_law(x: Sequence[float], y: Sequence[float]) -> tuple[float, Interval] | None:
    """Constant and exponent of y = c · x^b by least squares of the logarithms; None for fewer than three places x."""
    if len(set(x)) < 3:
        return None
    line = scipy.stats.linregress(np.log(x), np.log(y))
    slope, half = float(line.slope), _half_width(float(line.stderr), len(x) - 2)
    return math.exp(line.intercept), Interval(slope, slope - half, slope + half)


@dataclass(frozen=True)
class Test:
    """A difference of means with its 95 % interval, and the two-sided p of Student's test; `n` seeds of both sides."""

    method: str
    n: tuple[int, int]
    difference: float
    low: float
    high: float
    p: float


def difference(ours: Losses, theirs: Losses) -> Test | None:
    """Ours minus theirs: a paired t-test on the seeds that both have if they are two or more, else Welch's t-test.

    None with fewer than two seeds, without any spread, or if a run failed: nothing holds of the others alone.
    """
    if None in {*ours.values(), *theirs.values()}:
        return None
    if len(pairs := differences(ours, theirs)) > 1:
        return _one_sample(np.array(pairs, float), "paired t-test")
    a, b = np.array(list(ours.values()), float), np.array(list(theirs.values()), float)
    if min(len(a), len(b)) < 2 or max(np.ptp(a), np.ptp(b)) < NO_SPREAD * abs(a.mean()):
        return None
    v, w = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    freedom = (v + w) ** 2 / (v**2 / (len(a) - 1) + w**2 / (len(b) - 1))
    return _t_test(
        "Welch's t-test", (len(a), len(b)), a.mean() - b.mean(), math.sqrt(v + w), freedom
    )


def differences(ours: Losses, theirs: Losses) -> list[float | None]:
    """Ours minus theirs for each seed that both have; None if one of the two failed."""
    pairs = [(value, theirs[seed]) for seed, value in ours.items() if seed in theirs]
    return [None if a is None or b is None else a - b for a, b in pairs]


def mean_difference(ours: Losses, theirs: Losses, form: str) -> str:
    """`−0.041 (−0.080 … −0.002)` over the seeds that both have, with the interval of two or more; – without one."""
    pairs = differences(ours, theirs)
    if not pairs or None in pairs:
        return of_seeds(pairs)
    test = _one_sample(values := np.array(pairs, float), "paired t-test")
    return minus(
        f"{values.mean():{form}}" + (f" ({test.low:{form}} … {test.high:{form}})" if test else "")
    )


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for their number (Holm 1979)."""
    p = np.array(values, float)  # None is NaN, which is sorted last
    known = np.argsort(p)[: np.isfinite(p).sum()]
    p[known] = np.minimum(1.0, np.maximum.accumulate(p[known] * np.arange(len(known), 0, -1)))
    return [None if math.isnan(value) else float(value) for value in p]


def _one_sample(values: NDArray[np.float64], method: str) -> Test | None:
    n = len(values)
    if n < 2 or np.ptp(values) < NO_SPREAD * max(1.0, np.abs(values).max()):
        return None
    return _t_test(method, (n, n), values.mean(), values.std(ddof=1) / math.sqrt(n), n - 1)


def _t_test(method: str, n: tuple[int, int], mean: float, error: float, freedom: float) -> Test:
    """Student's test of a mean with a standard error, which is not 0, and degrees of freedom."""
    half, p = (
        _half_width(error, freedom),
        2 * float(scipy.special.stdtr(freedom, -abs(mean) / error)),
    )
    return Test(method, n, float(mean), float(mean - half), float(mean + half), p)


def _half_width(error: float, freedom: float) -> float:
    """Half of Student's 95 % interval."""
    return float(scipy.special.stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error


@dataclass(frozen=True)
class SpeedUp:
    """A speed-up in tokens.

    Args:
        values: One for each pair of seeds, None where the run never has the loss, or one of the two failed; () if the
            baseline has not finished, or was validated on something else.
        bound: A run had the loss at its first validation, so the speed-up is at least this.
        paired: The seeds were compared in pairs, not with the baseline's mean curve.
        left_out: The number of runs on seeds that the baseline does not have.
        why: Why there are no values.
    """

    values: tuple[float | None, ...]
    bound: bool = False
    paired: bool = True
    left_out: int = 0
    why: str = ""

    @property
    def pairs(self) -> str:
        """` (1 seed)`, the number of pairs where it is not that of the runs, to stand behind a number."""
        return f" ({len(self.values)} seed{'s' * (len(self.values) > 1)})" if self.left_out else ""

    @property
    def mean(self) -> float | None:
        """The geometric mean; None unless there are pairs and each has a value."""
        return (
            None
            if None in self.values or not self.values
            else math.exp(np.log(np.array(self.values, float)).mean())
        )

    @property
    def test(self) -> Test | None:
        """The t-test of the logarithm against 0 with its interval; None without a mean or with fewer than two pairs."""
        test = (
            None
            if self.mean is None
            else _one_sample(np.log(np.array(self.values, float)), LOG_TEST)
        )
        return test and replace(
            test,
            difference=math.exp(test.difference),
            low=math.exp(test.low),
            high=math.exp(test.high),
        )

    def over(self, time: Interval) -> Interval | None:
        """The mean over the `time` of a token, with the interval of both, none for one pair; None without a mean."""
        if self.mean is None:
            return None
        if len(self.values) < 2:  # the seeds' share of it is not known, and the larger one
            return Interval(self.mean / time.median, math.nan, math.nan)
        tokens = (
            Interval(self.mean, self.test.low, self.test.high)
            if self.test
            else Interval(*[self.mean] * 3)
        )
        return product(tokens, Interval(1 / time.median, 1 / time.high, 1 / time.low))

    @property
    def words(self) -> str:
        """`1.40 (1.31 … 1.50)`, `1.40` for one pair, `1.40 (1 seed)` for one of more runs, `2 of 3 seeds`,
        `not reached` or `– (baseline unfinished)`."""
        if self.why:
            return f"{NONE} ({self.why})"
        if self.mean is None:
            return of_seeds(self.values, f"not reached{self.pairs}")
        interval = f" ({self.test.low:.2f} … {self.test.high:.2f})" if self.test else ""
        return f"{'≥ ' * self.bound}{self.mean:.2f}{interval}{self.pairs}"


def tokens_to_loss(curve: Curve, loss: float) -> float | None:
    """Training tokens at which `curve` first is at or below `loss`; None if it never is."""
    below = np.flatnonzero(curve.loss <= loss)
    if len(below) == 0:
        return None
    around = slice(max(0, below[0] - 1), below[0] + 1)
    return float(np.interp(-loss, -curve.loss[around], curve.tokens[around]))


def speed_up(baseline: SeededCurves, others: SeededCurves) -> SpeedUp:
    """The speed-up of the runs `others` over those of `baseline`."""
    partners = dict(baseline)
    pairs = [(partners[seeds], curve) for seeds, curve in others if seeds in partners]
    if not (paired := bool(pairs)):
        known = [curve for _, curve in baseline if curve is not None]
        pairs = [
            (mean_curve(known)[0] if len(known) == len(baseline) else None, curve)
            for _, curve in others
        ]
    values: list[float | None] = []
    bound = False
    for ours, theirs in pairs:
        if ours is None or theirs is None:
            values.append(None)
            continue
        target = float(ours.loss[-1])
        cost, own = tokens_to_loss(theirs, target), tokens_to_loss(ours, target)
        values.append(own / cost if own and cost else None)
        bound |= bool(theirs.loss[0] < target)
    return SpeedUp(tuple(values), bound, paired, len(others) - len(pairs))
