"""Statistics against scipy and textbook formulas, and speed-ups of curves worked out by hand.

Paired tests and the mean of several seeds are tested in study/test_report.py.
"""

import math

import numpy as np
import pytest
from scipy import stats

from anlit.compare.notes import split_by_gap
from anlit.compare.statistics import (
    Interval,
    SpeedUp,
    difference,
    holm,
    power_law,
    speed_up,
)
from anlit.errors import UserError
from anlit.runs.folders import Curve
from anlit.runs.groups import mean_curve
from tests.compare.conftest import FALLING
from tests.compare.reports import geometric_t_interval


@pytest.mark.filterwarnings("error")
def test_other_seeds_are_compared_by_welch() -> None:
    losses = {1: 3.0, 2: 3.2, 3: 3.1}
    other_losses = {7: 3.4, 8: 3.5}

    test = difference(losses, other_losses)

    expected = stats.ttest_ind([3.0, 3.2, 3.1], [3.4, 3.5], equal_var=False)
    low, high = expected.confidence_interval()
    assert test is not None
    assert test.method == "Welch's t-test"
    assert test.n == (3, 2)
    assert test.p == pytest.approx(expected.pvalue)
    assert test.difference == pytest.approx(-0.35)
    assert test.low == pytest.approx(low)
    assert test.high == pytest.approx(high)


@pytest.mark.filterwarnings("error")  # such as a warning of lost precision
def test_one_configuration_without_spread_is_compared_by_welch() -> None:
    losses = {1: 3.0, 2: 3.2, 3: 3.1}
    losses_without_spread = {7: 3.4, 8: 3.4}

    test = difference(losses, losses_without_spread)

    summary = {"mean1": 3.1, "std1": 0.1, "nobs1": 3}
    summary_without_spread = {"mean2": 3.4, "std2": 0.0, "nobs2": 2}
    expected = stats.ttest_ind_from_stats(**summary, **summary_without_spread, equal_var=False)
    assert test is not None
    assert test.p == pytest.approx(expected.pvalue)


SINGLE = {1: 3.0}
PAIR = {1: 3.0, 2: 3.1}
WITHOUT_SPREAD = {1: 3.0, 2: 3.0}


@pytest.mark.parametrize(
    ("losses", "other_losses"),
    [
        pytest.param(SINGLE, {1: 3.1}, id="one pair"),
        pytest.param(SINGLE, {2: 3.1, 3: 3.2}, id="one seed against two"),
        pytest.param(PAIR, {1: 3.1, 2: 3.2}, id="differences without spread"),
        pytest.param(WITHOUT_SPREAD, {3: 3.1, 4: 3.1}, id="no spread at all"),
    ],
)
def test_nothing_is_claimed_of_one_seed_or_no_spread(losses: dict, other_losses: dict) -> None:
    assert difference(losses, other_losses) is None


@pytest.mark.parametrize(
    "with_a_lost_run",
    [
        pytest.param({1: 3.2, 2: 3.4, 3: None}, id="the same seeds"),
        pytest.param({4: 3.2, 5: 3.4, 6: None}, id="other seeds"),
    ],
)
def test_nothing_is_claimed_where_a_run_was_lost(with_a_lost_run: dict) -> None:
    all_losses = {1: 3.1, 2: 3.5, 3: 3.0}

    assert difference(with_a_lost_run, all_losses) is None
    assert difference(all_losses, with_a_lost_run) is None


def test_a_small_spread_is_a_spread() -> None:
    losses = {1: 3.2, 2: 3.20001}
    losses_without_spread = {1: 3.1, 2: 3.1}

    assert difference(losses, losses_without_spread) is not None


def test_holm_multiplies_the_smallest_most() -> None:
    adjusted = holm([0.01, None, 0.04, 0.03])

    assert adjusted == pytest.approx([0.03, None, 0.06, 0.06])


def test_holm_gives_no_probability_above_1() -> None:
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def curve(losses: dict[int, float], seconds_per_token: float = 1.0) -> Curve:
    """A curve with losses by tokens."""
    tokens = np.array(list(losses), dtype=float)
    loss = np.array(list(losses.values()))
    return Curve(tokens, tokens * seconds_per_token, loss)


BASELINE = curve(FALLING, seconds_per_token=2.0)
"""It has its last loss, 3, after 400 tokens."""

BETWEEN_POINTS = {100: 4.0, 200: 3.2, 300: 2.8}
NEVER_REACHED = {100: 4.0, 400: 3.0001}
STARTS_BELOW = {200: 2.9, 300: 2.0}
CROSSES_TWICE = {100: 4.0, 200: 2.0, 300: 3.6, 400: 1.0}
SPIKE = {100: 3.5, 200: 5.0, 300: 1.0}
NO_TOKENS = {0: 2.0, 100: 1.0}


def speed_up_of_a_seed(baseline: Curve, run: Curve) -> SpeedUp:
    return speed_up([(1, baseline)], [(1, run)])


@pytest.mark.parametrize("seconds_per_token", [4.0, np.nan])  # time that was not logged
@pytest.mark.parametrize(
    ("losses", "speedup", "bound"),
    [
        pytest.param(BETWEEN_POINTS, 400 / 250, False, id="between two points"),
        pytest.param(NEVER_REACHED, None, False, id="never reached, and not extrapolated"),
        pytest.param(STARTS_BELOW, 2.0, True, id="a start below it is a lower bound"),
        pytest.param(CROSSES_TWICE, 400 / 150, False, id="the first crossing counts"),
        pytest.param(SPIKE, 400 / 250, False, id="a spike before is not smoothed away"),
        pytest.param(NO_TOKENS, None, True, id="tokens of zero have no ratio"),
    ],
)
def test_a_curve_has_the_speed_up_worked_out_by_hand(
    losses: dict, speedup: float | None, bound: bool, seconds_per_token: float
) -> None:
    run = curve(losses, seconds_per_token)

    result = speed_up_of_a_seed(BASELINE, run)

    assert result.mean == pytest.approx(speedup)
    assert result.test is None
    assert result.bound == bound


def test_a_baseline_that_rises_at_the_end_is_charged_its_first_crossing() -> None:
    overfit = curve({100: 5.0, 200: 3.0, 300: 2.0, 400: 2.5})
    run = curve({100: 3.0, 150: 2.5})

    result = speed_up_of_a_seed(overfit, run)

    assert result.mean == pytest.approx(250 / 150)


def test_a_baseline_that_starts_at_its_final_loss_gives_no_speed_up() -> None:
    """It had the loss at some time before its first validation."""
    diverging = curve({100: 3.0, 200: 2.5, 300: 3.6})
    run = curve({100: 4.0, 200: 3.0})

    result = speed_up_of_a_seed(diverging, run)

    assert result.values == ()
    assert result.words == "– (baseline rises)"


EASY = curve({100: 4.0, 400: 1.0})
HARD = curve({100: 6.0, 400: 3.0})
QUICK_EASY = curve({100: 3.0, 200: 1.0})
QUICK_HARD = curve({100: 5.0, 200: 3.0})
MISSING_HARD = curve({100: 5.0, 200: 3.1})
EASY_AND_HARD = [(1, EASY), (2, HARD)]
"""The baseline's seeds with their curves."""
RATIO_OF_TIMES = Interval(2.0, 1.9, 2.1)


def test_every_pair_has_its_own_target_and_only_common_seeds_count() -> None:
    runs = [(2, QUICK_HARD), (1, QUICK_EASY), (3, QUICK_HARD)]

    speedup = speed_up(EASY_AND_HARD, runs)

    assert speedup.values == (2.0, 2.0)
    assert speedup.words == "2.00 (2 seeds)"


def test_one_seed_that_misses_its_target_takes_the_mean_away() -> None:
    runs = [(1, QUICK_EASY), (2, MISSING_HARD)]

    speedup = speed_up(EASY_AND_HARD, runs)

    assert speedup.values == (2.0, None)
    assert speedup.mean is None
    assert speedup.test is None
    assert speedup.words == "1 of 2 seeds"


@pytest.mark.parametrize(
    ("baseline", "runs"),
    [
        pytest.param([EASY, None], [QUICK_EASY, QUICK_HARD], id="of the baseline"),
        pytest.param([EASY, HARD], [QUICK_EASY, None], id="of the configuration"),
    ],
)
def test_a_lost_run_takes_the_mean_away(baseline: list, runs: list) -> None:
    baseline_by_seed = list(enumerate(baseline))
    runs_by_seed = list(enumerate(runs))

    speedup = speed_up(baseline_by_seed, runs_by_seed)

    assert speedup.values == (2.0, None)
    assert speedup.words == "1 of 2 seeds"


def test_without_a_common_seed_runs_are_compared_with_the_mean_curve() -> None:
    """The hard run never gets to the mean curve's last loss."""
    runs = [(3, QUICK_EASY), (4, QUICK_HARD)]

    speedup = speed_up(EASY_AND_HARD, runs)

    assert not speedup.paired
    assert speedup.words == "1 of 2 seeds"


def test_a_seed_that_was_run_twice_is_one_pair() -> None:
    """Two runs of a seed are not independent: they must not narrow the interval."""
    runs = [(1, EASY), (1, QUICK_EASY), (2, QUICK_HARD)]

    speedup = speed_up(EASY_AND_HARD, runs)

    assert speedup.values == (2.0, 2.0)
    assert speedup.words == "2.00 (2 seeds)"


def test_against_a_mean_curve_there_is_no_interval() -> None:
    """The runs' spread is not the speed-up's spread: the baseline's seeds differ too."""
    slower = curve({100: 5.0, 230: 2.0})
    runs = [(3, QUICK_EASY), (4, slower)]

    speedup = speed_up(EASY_AND_HARD, runs)

    assert speedup.mean is not None
    assert speedup.test is None
    assert speedup.words == f"{speedup.mean:.2f}"
    wall_clock = speedup.over(RATIO_OF_TIMES)
    assert str(wall_clock) == f"{speedup.mean / 2:.2f}"


def test_a_bound_has_no_interval() -> None:
    """The run of the second seed may have had the loss long before."""
    starts_below = curve({100: 2.5, 400: 1.0})
    runs = [(1, QUICK_EASY), (2, starts_below)]

    speedup = speed_up(EASY_AND_HARD, runs)

    assert speedup.values == (2.0, 4.0)
    assert speedup.test is None
    assert speedup.words == "≥ 2.83"
    wall_clock = speedup.over(RATIO_OF_TIMES)
    assert str(wall_clock) == "1.41"


def test_an_interval_in_wall_clock_has_the_spread_of_tokens_and_of_times() -> None:
    """A speed-up is less certain downwards if the time may be longer."""
    values = (1.2, 1.5, 1.4)
    time = Interval(2.0, 1.6, 2.2)

    wall_clock = SpeedUp(values).over(time)

    mean = stats.gmean(values)
    low, high = geometric_t_interval(values)
    below = math.hypot(math.log(mean / low), math.log(2.2 / 2.0))
    above = math.hypot(math.log(high / mean), math.log(2.0 / 1.6))
    expected = np.array([mean, mean * math.exp(-below), mean * math.exp(above)]) / 2.0
    assert wall_clock is not None
    assert [wall_clock.median, wall_clock.low, wall_clock.high] == pytest.approx(expected)


def test_mean_curve_ends_at_the_mean_final_loss_and_keeps_the_common_range() -> None:
    first = curve({100: 4.0, 200: 3.0, 300: 2.0})
    second = curve({100: 5.0, 300: 3.0})

    mean, (lowest, highest) = mean_curve([first, second])

    assert mean.tokens.tolist() == [100, 200, 300]
    assert mean.loss.tolist() == [4.5, 3.5, 2.5]
    assert lowest.tolist() == [4.0, 3.0, 2.0]
    assert highest.tolist() == [5.0, 4.0, 3.0]


def test_curves_without_a_common_range_have_no_mean() -> None:
    first = curve({100: 4.0, 200: 3.0})
    later = curve({400: 1.0})

    with pytest.raises(UserError, match="no range"):
        mean_curve([first, later])


def test_final_losses_in_two_groups_are_recognised() -> None:
    low_losses = [2.10, 2.12]
    high_losses = [2.29, 2.30, 2.31]

    groups = split_by_gap([2.30, 2.10, 2.31, 2.12, 2.29])

    assert groups == (low_losses, high_losses)


@pytest.mark.parametrize("n_losses", [4, 5, 6, 7, 12])
def test_normal_losses_are_rarely_two_groups(n_losses: int) -> None:
    draws = np.random.default_rng(0).normal(size=(4000, n_losses))

    n_splits = sum(split_by_gap(losses) is not None for losses in draws.tolist())

    assert n_splits / len(draws) < 0.027  # 0.02 and three standard deviations


@pytest.mark.parametrize(
    "losses",
    [
        pytest.param([2.30, 2.10, 2.31, 2.16], id="a gap that is not wide"),
        pytest.param([2.0, 2.1, 2.2, 2.3, 2.4], id="equal gaps"),
        pytest.param([2.0, 2.0, 2.5], id="three runs"),
    ],
)
def test_final_losses_without_a_wide_gap_or_of_three_runs_are_one_group(
    losses: list[float],
) -> None:
    assert split_by_gap(losses) is None


def test_the_limits_of_a_speed_up_are_those_of_crossings_at_the_validations_around_them() -> None:
    baseline = [(1, curve(FALLING)), (2, curve({100: 5.0, 200: 2.9, 400: 3.0}))]
    runs = [(1, curve({100: 4.0, 200: 3.2, 400: 2.6})), (2, curve({100: 4.0, 300: 3.0}))]

    speedup = speed_up(baseline, runs)

    # Seed 1: 400 over 200 … 400. Seed 2: 100 … 200 over 300.
    assert speedup.limits == pytest.approx((np.sqrt(1 / 3), np.sqrt(2 * 2 / 3)))
    assert speedup.mean is not None
    assert speedup.limits[0] < speedup.mean < speedup.limits[1]


@pytest.mark.parametrize(
    ("sizes", "rates"),
    [
        pytest.param([64, 128, 256], [0.016, 0.008, 0.004], id="steps of 2"),
        pytest.param(
            [100, 200, 400, 800],
            [0.016, 0.016 / 2**0.5, 0.008, 0.008 / 2**0.5],
            id="residuals of rounding",
        ),
        pytest.param([64, 128, 256], [0.004, 0.004, 0.004], id="the same rate"),
    ],
)
def test_best_values_on_a_line_do_not_make_an_exponent_certain(
    sizes: list[float], rates: list[float]
) -> None:
    law = power_law(sizes, rates)

    assert law is not None
    _, exponent = law
    line = stats.linregress(np.log(sizes), np.log(rates))
    assert exponent.median == pytest.approx(line.slope)
    assert np.isnan([exponent.low, exponent.high]).all()
