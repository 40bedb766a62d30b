"""Statistics over seeds, and the convergence speed-up (arXiv 2505.22014) of all reports.

    speed-up of B over A = tokens of A / tokens of B, at which each first has A's final loss

Curves are linear between two validation points, never smoothed or extrapolated. Runs are paired on
the seeds (of initial weights and data order) that both have. Without a common seed each run of B is
compared with A's mean curve. The speed-up is the geometric mean of the pairs. It needs all of them:
a mean over the runs that get there is too good.
"""

import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import scipy  # loads its modules where they are first used: scipy.stats takes half a second
from numpy.typing import NDArray

from anlit.compare.crossings import tokens_to_loss, tokens_to_stay, validations_around
from anlit.reporting.table import NONE
from anlit.reporting.text import count_of, minus
from anlit.runs.folders import Curve
from anlit.runs.groups import mean_curve

CONFIDENCE = 0.95
"""Confidence of all intervals."""
NO_SPREAD = 1e-9
"""Values with a smaller relative spread differ by rounding only, which no test can judge."""
PAIRED_TEST = "paired t-test"
LOG_TEST = "t-test of the logarithm"
WELCH_TEST = "Welch's t-test"
SeededCurves = Sequence[tuple[Hashable, Curve | None]]
"""Seeds and validation curve (without NaN) of each run of a configuration. None for a run that
failed."""
Losses = Mapping[Hashable, float | None]
"""Final loss by seed. None for a run that failed."""
Values = Sequence[float | None]
"""A value for each seed. None for a seed without a value."""


@dataclass(frozen=True)
class Summary:
    """Values of the seeds. The mean needs all."""

    values: Values

    @property
    def mean(self) -> float | None:
        if not self.values or None in self.values:
            return None
        return float(np.mean(np.array(self.values, float)))

    @property
    def sd(self) -> float | None:
        """Sample standard deviation (n − 1) over seeds. None for one seed or without a mean."""
        if self.mean is None or len(self.values) < 2:
            return None
        return float(np.std(np.array(self.values, float), ddof=1))


MEANING_OF_SD = "± is the standard deviation over seeds."
"""For a page with cells of `mean_sd`."""


def mean_sd(summary: Summary, digits: int) -> str:
    """`3.2101 ± 0.0042`, and `−0.0105 ± 0.0006` below 0.

    A page with such cells has `MEANING_OF_SD`, or the same in its own words. One seed has no ±.
    Without a mean it is `of_seeds`, and a mean that is not finite is in words.
    """
    if summary.mean is None:
        return of_seeds(summary.values)
    if not math.isfinite(summary.mean):
        return "not finite"
    mean = minus(f"{summary.mean:,.{digits}f}")
    if summary.sd is None:
        return mean
    return f"{mean} ± {summary.sd:,.{digits}f}"


def of_seeds(values: Values, fallback: str = NONE) -> str:
    """`2 of 3 seeds` have a value; `fallback` if no seed has."""
    n_values = sum(value is not None for value in values)
    return f"{n_values} of {len(values)} seeds" if n_values else fallback


class Interval(NamedTuple):
    """A median or another estimate, and an interval of at least 95 % confidence.

    NaN without an interval.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.median:.2f}"
        return f"{self.median:.2f} ({self.low:.2f} … {self.high:.2f})"


def median_with_interval(values: Sequence[float]) -> Interval:
    """The median, and an interval between two of the sorted values with at least 95 % confidence.

    The number of values below the true median is binomial, whatever their distribution. Fewer than
    six values cannot reach 95 %: NaN for low and high.
    """
    test: Any = scipy.stats.quantile_test(np.asarray(values, dtype=float), p=0.5)
    interval = test.confidence_interval(CONFIDENCE)
    return Interval(float(np.median(values)), float(interval.low), float(interval.high))


def product(a: Interval, b: Interval) -> Interval:
    """The product of two independent positive estimates.

    Squares of the intervals' logarithmic widths add up.
    """
    below = math.hypot(math.log(a.median / a.low), math.log(b.median / b.low))
    above = math.hypot(math.log(a.high / a.median), math.log(b.high / b.median))
    estimate = a.median * b.median
    return Interval(estimate, estimate * math.exp(-below), estimate * math.exp(above))


def power_law(x: Sequence[float], y: Sequence[float]) -> tuple[float, Interval] | None:
    """Constant and exponent of y = c · x^b by least squares of the logarithms.

    None for fewer than three x. Points on the line itself give no interval. The best values of
    grids with equal steps often are, and do not show that the exponent is exact.
    """
    if len(set(x)) < 3:
        return None
    log_x = np.log(x)
    log_y = np.log(y)
    line = scipy.stats.linregress(log_x, log_y)
    slope = float(line.slope)
    residuals = log_y - (line.intercept + slope * log_x)
    half = math.nan
    if np.ptp(residuals) > NO_SPREAD:
        half = float(line.stderr * scipy.stats.t.ppf((1 + CONFIDENCE) / 2, len(x) - 2))
    return math.exp(line.intercept), Interval(slope, slope - half, slope + half)


def slope_over_seeds(x: NDArray[np.float64], logarithms: NDArray[np.float64]) -> Interval:
    """The factor exp(slope) of lines by least squares, and the t-interval over their seeds.

    Args:
        x: Shape (points,).
        logarithms: The logarithms of the values, shape (points, seeds).

    Returns:
        NaN for low and high with one seed, or without any spread.
    """
    slopes = np.polyfit(x, logarithms, 1)[0]
    factor = math.exp(slopes.mean())
    test = _one_sample(slopes, LOG_TEST)
    if test is None:
        return Interval(factor, math.nan, math.nan)
    return Interval(factor, math.exp(test.low), math.exp(test.high))


@dataclass(frozen=True)
class Test:
    """A difference of means with its 95 % interval, and the two-sided p of Student's test.

    `n` seeds of both sides.
    """

    method: str
    n: tuple[int, int]
    difference: float
    low: float
    high: float
    p: float


def difference(a: Losses, b: Losses) -> Test | None:
    """a − b: a paired t-test on common seeds. With fewer than two, Welch's t-test.

    None with fewer than two seeds, without any spread, or if a run failed. The other runs alone
    prove nothing.
    """
    if None in {*a.values(), *b.values()}:
        return None
    pairs = differences(a, b)
    if len(pairs) > 1:
        return _one_sample(np.array(pairs, float), PAIRED_TEST)
    left = np.array(list(a.values()), float)
    right = np.array(list(b.values()), float)
    spread = max(np.ptp(left), np.ptp(right))
    if min(len(left), len(right)) < 2 or spread < NO_SPREAD * abs(left.mean()):
        return None
    with warnings.catch_warnings(action="ignore"):  # of lost precision, where a side is constant
        result: Any = scipy.stats.ttest_ind(left, right, equal_var=False)
    mean = float(left.mean() - right.mean())
    return _as_test(WELCH_TEST, (len(left), len(right)), mean, result)


def differences(a: Losses, b: Losses) -> list[float | None]:
    """a − b for each seed that both have. None if a run failed."""
    values: list[float | None] = []
    for seed, loss in a.items():
        if seed in b:
            other_loss = b[seed]
            if loss is None or other_loss is None:
                values.append(None)
            else:
                values.append(loss - other_loss)
    return values


def mean_difference(a: Losses, b: Losses, form: str) -> str:
    """`−0.041 (−0.080 … −0.002)`: a − b over the seeds that both have.

    The interval needs two seeds; – without a common seed.
    """
    pairs = differences(a, b)
    if not pairs or None in pairs:
        return of_seeds(pairs)
    values = np.array(pairs, float)
    test = _one_sample(values, PAIRED_TEST)
    mean = f"{values.mean():{form}}"
    if test is None:
        return minus(mean)
    return minus(f"{mean} ({test.low:{form}} … {test.high:{form}})")


def holm(values: Values) -> list[float | None]:
    """p-values corrected for their number (Holm 1979)."""
    p = np.array(values, float)  # None is NaN, which is sorted last
    tested = np.argsort(p)[: np.isfinite(p).sum()]
    factors = np.arange(len(tested), 0, -1)
    p[tested] = np.minimum(1.0, np.maximum.accumulate(p[tested] * factors))
    return [None if math.isnan(value) else float(value) for value in p]


def _one_sample(values: NDArray[np.float64], method: str) -> Test | None:
    """The t-test of a mean against 0. None for one value or without any spread."""
    n = len(values)
    if n < 2 or np.ptp(values) < NO_SPREAD * max(1.0, np.abs(values).max()):
        return None
    result: Any = scipy.stats.ttest_1samp(values, 0.0)
    return _as_test(method, (n, n), float(values.mean()), result)


def _as_test(method: str, n: tuple[int, int], mean: float, result: Any) -> Test:
    """The test that scipy made."""
    interval = result.confidence_interval(CONFIDENCE)
    return Test(method, n, mean, float(interval.low), float(interval.high), float(result.pvalue))


@dataclass(frozen=True)
class SpeedUp:
    """A speed-up in tokens.

    Args:
        values: A value for each pair of seeds. None if the run never has the loss, or a run of
            the pair failed. () with an obstacle.
        bound: A run had the loss at its first validation. The speed-up is at least this.
        paired: The seeds were compared in pairs, not with the baseline's mean curve.
        left_out: The number of runs in no pair: on seeds that the baseline does not have, or that
            a later run has too.
        risen: The number of runs that had the baseline's final loss and end above it.
        lasting: The mean if each crossing were the last one, after which the run stays at or below
            the baseline's final loss. None without a mean, or if a run ends above.
        missing: The number of the baseline's seeds that the other arm lacks.
        limits: The mean if each crossing were at the later, or at the earlier, of the two
            validations around it. None without a mean.
        obstacle: Why the runs cannot be compared, in two words. "" if they can.
    """

    values: tuple[float | None, ...]
    bound: bool = False
    paired: bool = True
    left_out: int = 0
    risen: int = 0
    lasting: float | None = None
    missing: int = 0
    limits: tuple[float, float] | None = None
    obstacle: str = ""

    @property
    def pairs(self) -> str:
        """` (1 seed)`, the number of pairs behind a number, if runs are left out."""
        return f" ({count_of(len(self.values), 'seed')})" if self.left_out else ""

    @property
    def is_single(self) -> bool:
        """Whether a single pair of seeds has a value."""
        return len(self.values) == 1 and self.mean is not None

    @property
    def mean(self) -> float | None:
        """The geometric mean. None unless there are pairs and each has a value."""
        if not self.values or None in self.values:
            return None
        return math.exp(self._logarithms().mean())

    @property
    def has_spread(self) -> bool:
        """Whether the values have the spread of the speed-up over seeds.

        A single pair has none. A bound may be far from its value. Against the baseline's mean curve
        the values lack the baseline's spread.
        """
        return len(self.values) > 1 and self.paired and not self.bound

    @property
    def test(self) -> Test | None:
        """The t-test of the logarithm against 0 with its interval.

        None without a mean, or if the spread over seeds is not known.
        """
        if self.mean is None or not self.has_spread:
            return None
        test = _one_sample(self._logarithms(), LOG_TEST)
        if test is None:
            return None
        return replace(
            test,
            difference=math.exp(test.difference),
            low=math.exp(test.low),
            high=math.exp(test.high),
        )

    def _logarithms(self) -> NDArray[np.float64]:
        return np.log(np.array(self.values, float))

    def over(self, time: Interval) -> Interval | None:
        """Return the speed-up in wall-clock: the mean divided by `time`. None without a mean.

        `time` is the time per token over the baseline's. The interval has both uncertainties. There
        is none if the spread over seeds, the larger part, is not known.
        """
        if self.mean is None:
            return None
        if not self.has_spread:
            return Interval(self.mean / time.median, math.nan, math.nan)
        tokens = Interval(self.mean, self.mean, self.mean)
        if self.test:
            tokens = Interval(self.mean, self.test.low, self.test.high)
        return product(tokens, Interval(1 / time.median, 1 / time.high, 1 / time.low))

    @property
    def words(self) -> str:
        """The speed-up for a table.

        `1.40 (1.31 … 1.50)`, `1.40` for one pair, `≥ 1.40` for a bound, `1.40 (1 seed)` if runs are
        left out, `2 of 3 seeds`, `not reached` or `– (baseline unfinished)`.
        """
        if self.obstacle:
            return f"{NONE} ({self.obstacle})"
        if self.mean is None:
            return of_seeds(self.values, f"not reached{self.pairs}")
        bound = "≥ " if self.bound else ""
        interval = f" ({self.test.low:.2f} … {self.test.high:.2f})" if self.test else ""
        return f"{bound}{self.mean:.2f}{interval}{self.pairs}"


def partial_reach(speedup: SpeedUp) -> str:
    """`2 of 3 seeds reach the baseline's loss` if some do and some do not, else "".

    A number of seeds behind the word speed-up would read as a speed-up.
    """
    is_partial = speedup.mean is None and any(value is not None for value in speedup.values)
    if speedup.obstacle or not is_partial:
        return ""
    return f"{of_seeds(speedup.values)} reach the baseline's loss"


def speed_up(baseline: SeededCurves, curves: SeededCurves, obstacle: str = "") -> SpeedUp:
    """The speed-up of the runs with `curves` over the runs of `baseline`.

    With an `obstacle` to the comparison, in two words, it has the obstacle in place of values.
    """
    if obstacle:
        return SpeedUp((), obstacle=obstacle)
    partners = dict(baseline)
    # If runs have the same seeds, the last counts, as in `Group.loss_by_seed`.
    pairs = [(partners[seeds], run) for seeds, run in dict(curves).items() if seeds in partners]
    is_paired = bool(pairs)
    if not is_paired:
        mean = _mean_of_all(baseline)
        pairs = [(mean, curve) for _, curve in curves]
    if any(_rises(partner) for partner, _ in pairs):
        return SpeedUp((), paired=is_paired, obstacle="baseline rises")
    values = [_speed_up_of_pair(partner, curve, tokens_to_loss) for partner, curve in pairs]
    lasting = [_speed_up_of_pair(partner, curve, tokens_to_stay) for partner, curve in pairs]
    bound = any(_starts_below(partner, curve) for partner, curve in pairs)
    limits = _limits_of_mean([_limits_of_pair(partner, curve) for partner, curve in pairs])
    return SpeedUp(
        tuple(values),
        bound,
        is_paired,
        left_out=len(curves) - len(pairs),
        risen=sum(_ends_above(partner, curve) for partner, curve in pairs),
        lasting=SpeedUp(tuple(lasting)).mean,
        missing=len(partners.keys() - dict(curves).keys()) if is_paired else 0,
        limits=limits,
    )


def _limits_of_mean(limits: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    """The geometric mean of the lower, and of the upper limits. None if a pair has none."""
    if not limits or None in limits:
        return None
    low, high = np.exp(np.log(np.array(limits, float)).mean(0))
    return float(low), float(high)


def _limits_of_pair(baseline: Curve | None, curve: Curve | None) -> tuple[float, float] | None:
    """The speed-ups of crossings at the validations around them. None without a speed-up."""
    if baseline is None or curve is None:
        return None
    target = float(baseline.loss[-1])
    baseline_tokens = validations_around(baseline, target)
    tokens = validations_around(curve, target)
    if baseline_tokens is None or tokens is None or 0 in tokens:
        return None
    return baseline_tokens[0] / tokens[1], baseline_tokens[1] / tokens[0]


def _mean_of_all(curves: SeededCurves) -> Curve | None:
    """The mean curve. None if a run failed."""
    finished = [curve for _, curve in curves if curve is not None]
    return mean_curve(finished)[0] if len(finished) == len(curves) else None


def _speed_up_of_pair(
    baseline: Curve | None,
    curve: Curve | None,
    tokens_of_run: Callable[[Curve, float], float | None],
) -> float | None:
    """Tokens of the baseline over tokens of the run. None if a run failed or never has the loss.

    `tokens_of_run` counts the run's tokens, to its first crossing or to its last.
    """
    if baseline is None or curve is None:
        return None
    target = float(baseline.loss[-1])
    baseline_tokens = tokens_to_loss(baseline, target)
    tokens = tokens_of_run(curve, target)
    return baseline_tokens / tokens if baseline_tokens and tokens else None


def _rises(baseline: Curve | None) -> bool:
    """Whether a curve is at or below its last loss from the start.

    Then the tokens for this loss are not known.
    """
    return (
        baseline is not None and len(baseline) > 1 and bool(baseline.loss[0] <= baseline.loss[-1])
    )


def _ends_above(baseline: Curve | None, curve: Curve | None) -> bool:
    """Whether the run has the baseline's final loss on its way, and a higher loss at its end."""
    if baseline is None or curve is None:
        return False
    target = baseline.loss[-1]
    return bool(curve.loss.min() <= target < curve.loss[-1])


def _starts_below(baseline: Curve | None, curve: Curve | None) -> bool:
    """Whether the run has the baseline's final loss at its first validation."""
    return baseline is not None and curve is not None and bool(curve.loss[0] < baseline.loss[-1])
