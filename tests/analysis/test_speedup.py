"""Speed-ups of curves whose answer can be worked out by hand."""

import numpy as np
import pytest

from anlit.analysis.speedup import speed_up, targets
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
        found = speed_up(BASELINE, [curve(points, seconds_per_token)])
        assert found.tokens.mean == pytest.approx(speedup)
        assert found.tokens_share == (None if speedup is None else pytest.approx(100 / speedup))
        assert (found.tokens.sd, found.bound) == (None, bound)


def test_fractions_of_the_way_have_speed_ups_of_their_own():
    itself, never = (speed_up(BASELINE, [one]) for one in (BASELINE, curve([(100, 4.0), (400, 3.0001)])))
    assert [value.mean for value in itself.by_fraction.values()] == pytest.approx([1.0] * 5)
    assert never.averaged_tokens.mean is None
    assert never.by_fraction[0.6].mean is not None


def test_a_baseline_that_rises_at_the_end_is_charged_its_first_crossing():
    overfit = curve([(100, 5.0), (200, 3.0), (300, 2.0), (400, 2.5)])
    found = speed_up(overfit, [curve([(100, 3.0), (150, 2.5)])])
    assert found.tokens.mean == pytest.approx(250 / 150)


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
