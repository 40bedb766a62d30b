"""Speed-ups of curves whose answer can be worked out by hand."""

import numpy as np
import pytest

from anlit.analysis.speedup import Summary, crossing, speed_up, targets
from anlit.runs.folders import Curve
from anlit.runs.groups import mean_curve


def curve(points, seconds_per_token=1.0):
    tokens, loss = np.array(points, dtype=float).T
    return Curve(tokens, tokens * seconds_per_token, loss)


BASELINE = curve([(100, 5.0), (200, 4.0), (300, 3.5), (400, 3.0)], seconds_per_token=2.0)


def test_crossing_between_two_points_is_interpolated():
    other = curve([(100, 4.0), (200, 3.2), (300, 2.8)], seconds_per_token=4.0)
    found = speed_up(BASELINE, [other])
    assert crossing(other, 3.0).tokens == pytest.approx(250)
    assert found.tokens.mean == pytest.approx(400 / 250)
    assert found.tokens_share == pytest.approx(62.5)
    assert found.tokens.sd is None
    assert not found.bound


def test_never_reached_has_no_value_and_is_not_extrapolated():
    found = speed_up(BASELINE, [curve([(100, 4.0), (400, 3.0001)])])
    assert found.tokens.mean is None
    assert found.tokens_share is None
    assert found.averaged_tokens.mean is None
    assert found.by_fraction[0.6].mean is not None


def test_a_curve_against_itself_is_one_everywhere():
    found = speed_up(BASELINE, [BASELINE])
    assert found.tokens.values == (1.0,)
    assert [value.mean for value in found.by_fraction.values()] == pytest.approx([1.0] * 5)


def test_target_met_exactly_at_the_first_point():
    found = speed_up(BASELINE, [curve([(160, 3.0), (200, 2.0)])])
    assert found.tokens.mean == pytest.approx(2.5)
    assert not found.bound


def test_start_below_the_target_is_a_lower_bound():
    found = speed_up(BASELINE, [curve([(200, 2.9), (300, 2.0)])])
    assert found.tokens.mean == pytest.approx(2.0)
    assert found.bound


def test_first_crossing_counts_on_a_curve_that_rises_again():
    other = curve([(100, 4.0), (200, 2.0), (300, 3.6), (400, 1.0)])
    assert crossing(other, 3.0).tokens == pytest.approx(150)


def test_a_spike_before_the_crossing_is_not_smoothed_away():
    other = curve([(100, 3.5), (200, 5.0), (300, 1.0)])
    assert crossing(other, 3.0).tokens == pytest.approx(250)


def test_a_baseline_that_rises_at_the_end_is_charged_its_first_crossing():
    overfit = curve([(100, 5.0), (200, 3.0), (300, 2.0), (400, 2.5)])
    found = speed_up(overfit, [curve([(100, 3.0), (150, 2.5)])])
    assert found.tokens.mean == pytest.approx(250 / 150)


def test_tokens_of_zero_have_no_ratio():
    assert speed_up(BASELINE, [curve([(0, 2.0), (100, 1.0)])]).tokens.mean is None


def test_time_that_was_not_logged_changes_nothing():
    other = Curve(np.array([100.0, 200.0]), np.array([np.nan, np.nan]), np.array([4.0, 2.0]))
    found = speed_up(BASELINE, [other])
    assert found.tokens.mean == pytest.approx(400 / 150)


def test_seeds_give_mean_and_sample_standard_deviation():
    seeds = [curve([(100, 4.0), (end, 3.0)]) for end in (200, 250, 400)]
    found = speed_up(BASELINE, seeds).tokens
    assert found.values == pytest.approx((2.0, 1.6, 1.0))
    assert found.mean == pytest.approx(4.6 / 3)
    assert found.sd == pytest.approx(np.std([2.0, 1.6, 1.0], ddof=1))


def test_one_seed_that_misses_takes_the_mean_away():
    found = speed_up(BASELINE, [curve([(100, 4.0), (200, 3.0)]), curve([(100, 4.0), (200, 3.1)])]).tokens
    assert found.values == (2.0, None)
    assert (found.reached, found.mean, found.sd) == (1, None, None)


def test_average_over_points_of_the_curve():
    other = curve([(50, 5.0), (100, 4.0), (150, 3.5), (200, 3.0)])
    found = speed_up(BASELINE, [other], fractions=(0.5, 0.75, 1.0))
    assert targets(BASELINE, (0.5, 0.75, 1.0)) == pytest.approx({0.5: 4.0, 0.75: 3.5, 1.0: 3.0})
    assert found.averaged_tokens.mean == pytest.approx(2.0)
    slower_start = curve([(80, 5.0), (160, 4.0), (200, 3.5), (200.5, 3.0)])
    found = speed_up(BASELINE, [slower_start], fractions=(0.5, 0.75))
    assert found.averaged_tokens.mean == pytest.approx((200 / 160 + 300 / 200) / 2)


def test_fractions_before_the_first_point_are_left_out():
    assert list(targets(BASELINE, (0.1, 0.5))) == [0.5]


def test_mean_curve_ends_at_the_mean_final_loss_and_keeps_the_common_range():
    one = curve([(100, 4.0), (200, 3.0), (300, 2.0)])
    two = curve([(100, 5.0), (300, 3.0)])
    mean, sd = mean_curve([one, two])
    assert mean.tokens.tolist() == [100, 200, 300]
    assert mean.loss.tolist() == [4.5, 3.5, 2.5]
    assert sd == pytest.approx([np.sqrt(0.5)] * 3)
    with pytest.raises(ValueError, match="no range"):
        mean_curve([one, curve([(400, 1.0)])])


def test_summary_of_nothing_has_no_mean():
    assert Summary(()).mean is None


def test_with_a_baseline_of_each_seed_every_curve_has_its_own_target():
    easy, hard = curve([(100, 4.0), (400, 1.0)]), curve([(100, 6.0), (400, 3.0)])
    quick_easy, quick_hard = curve([(100, 3.0), (200, 1.0)]), curve([(100, 5.0), (200, 3.0)])
    paired = speed_up([easy, hard], [quick_easy, quick_hard])
    assert paired.tokens.values == (2.0, 2.0)
    assert paired.tokens.sd == 0.0
    mean, _ = mean_curve([easy, hard])
    assert speed_up(mean, [quick_easy, quick_hard]).tokens.mean is None  # the hard seed never gets to the mean target
    with pytest.raises(ValueError, match="zip"):
        speed_up([easy], [quick_easy, quick_hard])
