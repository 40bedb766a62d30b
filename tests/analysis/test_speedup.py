"""Speed-ups of curves whose answer can be worked out by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from anlit.analysis.notes import parted
from anlit.analysis.statistics import speed_up
from anlit.runs.folders import Curve
from anlit.runs.groups import mean_curve


def curve(points, seconds_per_token=1.0):
    tokens, loss = np.array(points, dtype=float).T
    return Curve(tokens, tokens * seconds_per_token, loss)


BASELINE = curve([(100, 5.0), (200, 4.0), (300, 3.5), (400, 3.0)], seconds_per_token=2.0)


@pytest.mark.parametrize(
    ("points", "speedup", "bound"),
    [
        pytest.param([(100, 4.0), (200, 3.2), (300, 2.8)], 400 / 250, False, id="between two points"),
        pytest.param([(100, 4.0), (400, 3.0001)], None, False, id="never reached, and not extrapolated"),
        pytest.param([(100, 5.0), (200, 4.0), (300, 3.5), (400, 3.0)], 1.0, False, id="the baseline itself"),
        pytest.param([(160, 3.0), (200, 2.0)], 2.5, False, id="met exactly at the first point"),
        pytest.param([(200, 2.9), (300, 2.0)], 2.0, True, id="a start below it is a lower bound"),
        pytest.param(
            [(100, 4.0), (200, 2.0), (300, 3.6), (400, 1.0)], 400 / 150, False, id="the first crossing counts"
        ),
        pytest.param([(100, 3.5), (200, 5.0), (300, 1.0)], 400 / 250, False, id="a spike before is not smoothed away"),
        pytest.param([(0, 2.0), (100, 1.0)], None, True, id="tokens of zero have no ratio"),
    ],
)
def test_one_curve(points, speedup, bound):
    for seconds_per_token in (4.0, np.nan):  # time that was not logged changes nothing
        result = speed_up([(1, BASELINE)], [(1, curve(points, seconds_per_token))])
        assert result.mean == pytest.approx(speedup)
        assert (result.test, result.bound) == (None, bound)


def test_a_baseline_that_rises_at_the_end_is_charged_its_first_crossing():
    overfit = curve([(100, 5.0), (200, 3.0), (300, 2.0), (400, 2.5)])
    assert speed_up([(1, overfit)], [(1, curve([(100, 3.0), (150, 2.5)]))]).mean == pytest.approx(250 / 150)


def test_pairs_give_a_geometric_mean_with_an_interval_of_the_logarithm():
    seeds = [(seed, curve([(100, 4.0), (end, 3.0)])) for seed, end in enumerate((200, 250, 400))]
    result = speed_up([(seed, BASELINE) for seed, _ in seeds], seeds)
    assert result.values == pytest.approx((2.0, 1.6, 1.0))
    assert result.mean == pytest.approx((2.0 * 1.6 * 1.0) ** (1 / 3))
    low, high = stats.ttest_1samp(np.log([2.0, 1.6, 1.0]), 0).confidence_interval()
    assert (result.test.low, result.test.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert result.words == f"{result.mean:.2f} ({math.exp(low):.2f} … {math.exp(high):.2f})"


def test_one_seed_that_misses_takes_the_mean_away():
    seeds = [(1, curve([(100, 4.0), (200, 3.0)])), (2, curve([(100, 4.0), (200, 3.1)]))]
    result = speed_up([(1, BASELINE), (2, BASELINE)], seeds)
    assert result.values == (2.0, None)
    assert (result.mean, result.test, result.words) == (None, None, "1 of 2 seeds")


def test_every_pair_has_its_own_target_and_only_common_seeds_count():
    easy, hard = curve([(100, 4.0), (400, 1.0)]), curve([(100, 6.0), (400, 3.0)])
    quick_easy, quick_hard = curve([(100, 3.0), (200, 1.0)]), curve([(100, 5.0), (200, 3.0)])
    paired = speed_up([(1, easy), (2, hard)], [(2, quick_hard), (1, quick_easy), (3, quick_hard)])
    assert paired.values == (2.0, 2.0)
    without = speed_up([(1, easy), (2, hard)], [(3, quick_easy), (4, quick_hard)])
    assert not without.paired
    assert without.words == "1 of 2 seeds"  # the hard seed never gets to the mean curve's end


def test_mean_curve_ends_at_the_mean_final_loss_and_keeps_the_common_range():
    first = curve([(100, 4.0), (200, 3.0), (300, 2.0)])
    second = curve([(100, 5.0), (300, 3.0)])
    mean, sd = mean_curve([first, second])
    assert mean.tokens.tolist() == [100, 200, 300]
    assert mean.loss.tolist() == [4.5, 3.5, 2.5]
    assert sd == pytest.approx([np.sqrt(0.5)] * 3)
    with pytest.raises(ValueError, match="no range"):
        mean_curve([first, curve([(400, 1.0)])])


@pytest.mark.parametrize(
    ("losses", "groups"),
    [
        ([2.30, 2.10, 2.31, 2.12, 2.29], ([2.10, 2.12], [2.29, 2.30, 2.31])),
        ([2.30, 2.10, 2.31, 2.16], None),
        ([2.0, 2.1, 2.2, 2.3, 2.4], None),
        ([2.0, 2.0, 2.5], None),
    ],
)
def test_final_losses_in_two_groups_are_recognised(losses, groups):
    assert parted(losses) == groups
