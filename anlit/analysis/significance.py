"""Is a difference between two groups of seeds larger than chance? t-tests, with Holm's correction."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95
NO_SPREAD = 1e-9
"""Values with a smaller relative spread differ by rounding only, which no test can judge."""


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
    a = np.array(list(ours.values()))
    if set(ours) == set(theirs):
        return _one_sample(a - np.array([theirs[seed] for seed in ours]), "paired t-test", (len(a), len(a)))
    b = np.array(list(theirs.values()))
    if min(len(a), len(b)) < 2 or max(np.ptp(a), np.ptp(b)) < NO_SPREAD * abs(a.mean()):
        return None
    found = stats.ttest_ind(a, b, equal_var=False)
    low, high = found.confidence_interval(LEVEL)
    return Test(
        "Welch's t-test", (len(a), len(b)), float(a.mean() - b.mean()), float(low), float(high), float(found.pvalue)
    )


def ratio(values: Sequence[float]) -> Test | None:
    """Is a ratio, one value per seed, other than 1? A t-test of its logarithm; the mean is the geometric one."""
    found = _one_sample(np.log(np.array(values)), "t-test of the logarithm", (len(values), len(values)))
    if found is None:
        return None
    mean, low, high = (math.exp(value) for value in (found.difference, found.low, found.high))
    return Test(found.method, found.n, mean, low, high, found.p)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for their number (Holm 1979)."""
    known = sorted((value, place) for place, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (value, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * value))
        corrected[place] = largest
    return corrected


def _one_sample(values: np.ndarray, method: str, n: tuple[int, int]) -> Test | None:
    if len(values) < 2 or np.ptp(values) < NO_SPREAD * max(1.0, np.abs(values).max()) or not np.isfinite(values).all():
        return None
    found = stats.ttest_1samp(values, 0.0)
    low, high = found.confidence_interval(LEVEL)
    return Test(method, n, float(values.mean()), float(low), float(high), float(found.pvalue))
