"""Statistics against scipy and textbook formulas, and speed-ups of curves worked out by hand.

Paired tests and the mean of several seeds are tested in study/test_report.py.
"""

import numpy as np
import pytest
from scipy import stats

from anlit.compare.notes import split_by_gap
from anlit.compare.statistics import difference, holm, speed_up
from anlit.errors import UserError
from anlit.runs.folders import Curve
from anlit.runs.groups import mean_curve
from tests.compare.conftest import FALLING


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "theirs", [[3.4, 3.5], [3.4, 3.4]]
)  # the latter without a warning of lost precision
def test_other_seeds_are_compared_by_welch(theirs: list[float]) -> None:
    ours = [3.0, 3.2, 3.1]
    test = difference(dict(enumerate(ours)), dict(enumerate(theirs, 7)))
    assert test is not None
    assert (test.method, test.n) == ("Welch's t-test", (3, 2))
    expected = stats.ttest_ind_from_stats(
        3.1, 0.1, 3, np.mean(theirs), np.std(theirs, ddof=1), 2, equal_var=False
    )
    assert test.p == pytest.approx(expected.pvalue)
    if theirs[0] != theirs[1]:
        interval = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval()
        assert (test.difference, test.low, test.high) == pytest.approx((-0.35, *interval))


def test_nothing_is_claimed_of_one_seed_or_no_spread() -> None:
    """Nor where a run was lost."""
    one, two, flat = {1: 3.0}, {1: 3.0, 2: 3.1}, {1: 3.0, 2: 3.0}
    for lost in ({1: 3.2, 2: 3.4, 3: None}, {4: 3.2, 5: 3.4, 6: None}):
        assert (
            difference(lost, {1: 3.1, 2: 3.5, 3: 3.0})
            is difference({1: 3.1, 2: 3.5, 3: 3.0}, lost)
            is None
        )
    for other in (
        (one, {1: 3.1}),
        (one, {2: 3.1, 3: 3.2}),
        (two, {1: 3.1, 2: 3.2}),
        (flat, {3: 3.1, 4: 3.1}),
    ):
        assert difference(*other) is None
    assert difference({1: 3.2, 2: 3.20001}, {1: 3.1, 2: 3.1}) is not None, "a small spread is one"


def test_holm_multiplies_the_smallest_most() -> None:
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def curve(*points: tuple[float, float], seconds_per_token: float = 1.0) -> Curve:
    tokens, loss = np.array(points, dtype=float).T
    return Curve(tokens, tokens * seconds_per_token, loss)


BASELINE = curve(*FALLING, seconds_per_token=2.0)


@pytest.mark.parametrize(("points", "speedup", "bound"), [
    pytest.param([(100, 4.0), (200, 3.2), (300, 2.8)], 400 / 250, False, id="between two points"),
    pytest.param([(100, 4.0), (400, 3.0001)], None, False, id="never reached, and not extrapolated"),
    pytest.param([(200, 2.9), (300, 2.0)], 2.0, True, id="a start below it is a lower bound"),
    pytest.param([(100, 4.0), (200, 2.0), (300, 3.6), (400, 1.0)], 400 / 150, False, id="the first crossing counts"),
    pytest.param([(100, 3.5), (200, 5.0), (300, 1.0)], 400 / 250, False, id="a spike before is not smoothed away"),
    pytest.param([(0, 2.0), (100, 1.0)], None, True, id="tokens of zero have no ratio"),
])  # fmt: skip
def test_one_curve(points: list, speedup: float | None, bound: bool) -> None:
    for seconds_per_token in (4.0, np.nan):  # time that was not logged changes nothing
        result = speed_up(
            [(1, BASELINE)], [(1, curve(*points, seconds_per_token=seconds_per_token))]
        )
        assert result.mean == pytest.approx(speedup)
        assert (result.test, result.bound) == (None, bound)


def test_a_baseline_that_rises_at_the_end_is_charged_its_first_crossing() -> None:
    overfit = curve((100, 5.0), (200, 3.0), (300, 2.0), (400, 2.5))
    assert speed_up([(1, overfit)], [(1, curve((100, 3.0), (150, 2.5)))]).mean == pytest.approx(
        250 / 150
    )


def test_every_pair_has_its_own_target_and_only_common_seeds_count() -> None:
    """One seed that misses its target takes the mean away."""
    easy, hard = curve((100, 4.0), (400, 1.0)), curve((100, 6.0), (400, 3.0))
    quick_easy, quick_hard = curve((100, 3.0), (200, 1.0)), curve((100, 5.0), (200, 3.0))
    paired = speed_up([(1, easy), (2, hard)], [(2, quick_hard), (1, quick_easy), (3, quick_hard)])
    assert (paired.values, paired.words) == ((2.0, 2.0), "2.00 (2 seeds)")
    missed = speed_up([(1, easy), (2, hard)], [(1, quick_easy), (2, curve((100, 5.0), (200, 3.1)))])
    assert (missed.values, missed.mean, missed.test, missed.words) == (
        (2.0, None),
        None,
        None,
        "1 of 2 seeds",
    )
    for lost in (speed_up([(1, easy), (2, None)], [(1, quick_easy), (2, quick_hard)]),
                 speed_up([(1, easy), (2, hard)], [(1, quick_easy), (2, None)])):  # fmt: skip
        assert (lost.values, lost.words) == ((2.0, None), "1 of 2 seeds")
    without = speed_up([(1, easy), (2, hard)], [(3, quick_easy), (4, quick_hard)])
    assert (without.paired, without.words) == (False, "1 of 2 seeds"), (
        "the hard one never gets to the mean curve's end"
    )


def test_mean_curve_ends_at_the_mean_final_loss_and_keeps_the_common_range() -> None:
    first = curve((100, 4.0), (200, 3.0), (300, 2.0))
    mean, sd = mean_curve([first, curve((100, 5.0), (300, 3.0))])
    assert (mean.tokens.tolist(), mean.loss.tolist()) == ([100, 200, 300], [4.5, 3.5, 2.5])
    assert sd == pytest.approx([np.sqrt(0.5)] * 3)
    with pytest.raises(UserError, match="no range"):
        mean_curve([first, curve((400, 1.0))])


def test_final_losses_in_two_groups_are_recognised() -> None:
    assert split_by_gap([2.30, 2.10, 2.31, 2.12, 2.29]) == ([2.10, 2.12], [2.29, 2.30, 2.31])
    for losses in ([2.30, 2.10, 2.31, 2.16], [2.0, 2.1, 2.2, 2.3, 2.4], [2.0, 2.0, 2.5]):
        assert split_by_gap(losses) is None
