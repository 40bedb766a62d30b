"""Tests of differences against textbook formulas written out here."""

import math

import numpy as np
import pytest
from scipy import stats

from anlit.analysis.statistics import difference, holm, ratio


def test_the_same_seeds_are_compared_in_pairs() -> None:
    ours, theirs = {1: 3.0, 2: 3.2, 3: 3.1}, {1: 3.2, 3: 3.35, 2: 3.3}
    found = difference(ours, theirs)
    apart = np.array([-0.2, -0.1, -0.25])
    t = apart.mean() / (apart.std(ddof=1) / math.sqrt(3))
    assert found is not None
    assert (found.method, found.n) == ("paired t-test", (3, 3))
    assert found.difference == pytest.approx(apart.mean())
    assert found.p == pytest.approx(2 * stats.t.sf(abs(t), 2))
    half = stats.t.ppf(0.975, 2) * apart.std(ddof=1) / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((apart.mean() - half, apart.mean() + half))


def test_other_seeds_are_compared_by_welch() -> None:
    a, b = np.array([3.0, 3.2, 3.1]), np.array([3.4, 3.5])
    found = difference(dict(enumerate(a)), {7: 3.4, 8: 3.5})
    va, vb = a.var(ddof=1) / 3, b.var(ddof=1) / 2
    freedom = (va + vb) ** 2 / (va**2 / 2 + vb**2 / 1)
    assert found is not None
    assert (found.method, found.n) == ("Welch's t-test", (3, 2))
    assert found.p == pytest.approx(2 * stats.t.sf(abs(a.mean() - b.mean()) / math.sqrt(va + vb), freedom))


def test_nothing_is_claimed_of_one_seed_or_no_spread() -> None:
    assert difference({1: 3.0}, {1: 3.1}) is None
    assert difference({1: 3.0}, {2: 3.1, 3: 3.2}) is None
    assert difference({1: 3.0, 2: 3.1}, {1: 3.1, 2: 3.2}) is None
    assert difference({1: 3.0, 2: 3.0}, {3: 3.1, 4: 3.1}) is None
    assert ratio([1.5]) is None


def test_a_ratio_is_tested_by_its_logarithm() -> None:
    found = ratio([1.2, 1.5, 1.4])
    assert found is not None
    assert found.difference == pytest.approx((1.2 * 1.5 * 1.4) ** (1 / 3))
    assert found.low < found.difference < found.high
    assert found.p == pytest.approx(stats.ttest_1samp(np.log([1.2, 1.5, 1.4]), 0).pvalue)


def test_holm_multiplies_the_smallest_most() -> None:
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
