"""Annealed speed-ups against a naive version and against laws of known speed-up."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from anlit.compare.annealed import AnnealedSpeedUp, End, annealed_speed_up, tokens_for_loss, trend
from tests.compare.reports import geometric_t_interval, t_interval

LENGTHS = (500, 1000, 2000, 4000)
TOKENS_PER_STEP = 4096


def ends_of(loss_of_tokens, lengths=LENGTHS) -> dict[int, End | None]:
    """The ends of annealed runs. The loss is a function of the tokens."""
    ends: dict[int, End | None] = {}
    for length in lengths:
        tokens = float(length * TOKENS_PER_STEP)
        ends[length] = End(tokens, loss_of_tokens(tokens))
    return ends


def law(speedup: float = 1.0, irreducible: float = 0.0, exponent: float = 0.3):
    """L(D) = E + B/(s·D)^β: a model that needs 1/s of the tokens for every loss."""
    return lambda tokens: irreducible + 100.0 * (speedup * tokens) ** -exponent


def ends_by_seed(*speedups: float) -> dict[int, dict[int, End | None]]:
    """The ends of an arm with a speed-up for each seed."""
    ends = {}
    for seed, speedup in enumerate(speedups):
        ends[seed] = ends_of(law(speedup))
    return ends


def naive_tokens(ends: list[End], loss: float) -> tuple[float, str]:
    """Go through the baseline's ends in turn."""
    ends = sorted(ends)
    if ends[0].loss < loss:
        return ends[0].tokens, "<"
    for left, right in itertools.pairwise(ends):
        if left.loss >= loss >= right.loss:
            share = math.log(left.loss / loss) / math.log(left.loss / right.loss)
            ratio = right.tokens / left.tokens
            return left.tokens * ratio**share, ""
    return ends[-1].tokens, ">"


def test_tokens_for_a_loss_are_those_of_a_naive_version() -> None:
    random = np.random.default_rng(0)
    n_by_bound = {"": 0, ">": 0, "<": 0}
    for _ in range(200):
        losses = random.uniform(2.0, 4.0, size=4)
        falling_losses = sorted(losses, reverse=True)
        ends = list(map(End, LENGTHS, falling_losses))
        loss = random.uniform(1.9, 4.1)

        tokens, bound = tokens_for_loss(ends, loss)

        expected_tokens, expected_bound = naive_tokens(ends, loss)
        assert bound == expected_bound
        assert tokens == pytest.approx(expected_tokens, rel=1e-12)
        n_by_bound[bound] += 1
    assert min(n_by_bound.values()) > 5


def test_a_baseline_that_rises_has_a_loss_where_it_first_had_it() -> None:
    ends = [End(100, 4.0), End(200, 3.0), End(400, 3.5), End(800, 2.0)]

    tokens, _ = tokens_for_loss(ends, 3.2)

    expected, _ = naive_tokens(ends[:2], 3.2)
    assert tokens == pytest.approx(expected)


@pytest.mark.parametrize("speedup", [0.7, 1.0, 1.4, 1.9])
def test_the_speed_up_of_a_power_law_is_exact(speedup: float) -> None:
    """Power laws are lines in the logarithms, so every other interpolation fails here."""
    baseline = {}
    arm = {}
    for seed, exponent in ((1, 0.3), (2, 0.4)):
        baseline[seed] = ends_of(law(exponent=exponent))
        arm[seed] = ends_of(law(speedup, exponent=exponent))

    at_2000 = annealed_speed_up(baseline, arm, 2000)

    assert at_2000.tokens == 2000 * TOKENS_PER_STEP
    for ratio in at_2000.ratios.values():
        assert ratio == pytest.approx(speedup, rel=1e-9)
    assert at_2000.ratios.keys() == {1, 2}
    assert at_2000.is_exact


def test_an_irreducible_loss_makes_it_at_most_2_percent_too_large() -> None:
    errors = []
    for speedup in np.linspace(1.0, 1.99, 20):
        for irreducible in (0.0, 0.5, 1.5, 2.5):
            baseline = ends_of(law(irreducible=irreducible))
            arm = ends_of(law(speedup, irreducible=irreducible))
            ratio = annealed_speed_up({1: baseline}, {1: arm}, 1000).ratios[1]
            assert ratio is not None
            errors.append(ratio / speedup - 1)
    assert min(errors) > -1e-9
    assert 0.005 < max(errors) < 0.02


@pytest.mark.parametrize(
    ("speedup", "length", "sentence"),
    [
        (1.5, 4000, "> 1.00"),
        (5.0, 2000, "> 2.00"),
        (0.8, 500, "< 1.00"),
        (0.3, 1000, "< 0.50"),
    ],
)
def test_beyond_the_baselines_lengths_there_is_a_bound(speedup, length, sentence: str) -> None:
    baseline = {1: ends_of(law())}
    arm = {1: ends_of(law(speedup))}

    result = annealed_speed_up(baseline, arm, length)

    assert result.words == sentence
    assert not result.is_exact


def test_a_bound_on_one_seed_leaves_a_bound_without_interval() -> None:
    baseline = ends_by_seed(1.0, 1.0)

    one_bound = annealed_speed_up(baseline, ends_by_seed(0.9, 1.6), 4000)
    two_bounds = annealed_speed_up(baseline, ends_by_seed(0.3, 5.0), 1000)

    assert one_bound.words == f"> {math.sqrt(0.9):.2f}"
    assert two_bounds.words == "– (out of range)"


def test_the_interval_is_a_t_test_of_the_logarithms_over_pairs_of_seeds() -> None:
    baseline = ends_by_seed(1, 2, 3)
    arm = ends_by_seed(1 * 1.2, 2 * 1.5, 3 * 1.35)

    sentence = annealed_speed_up(baseline, arm, 1000).words

    ratios = [1.2, 1.5, 1.35]
    low, high = geometric_t_interval(ratios)
    assert sentence == f"{stats.gmean(ratios):.2f} ({low:.2f} … {high:.2f})"


@pytest.mark.parametrize("lost", ["arm", "baseline"])
def test_a_failed_run_counts_as_a_seed_and_one_under_way_does_not(lost: str) -> None:
    ends = {"arm": ends_by_seed(1.0, 1.0), "baseline": ends_by_seed(1.0, 1.0)}
    ends[lost][1][1000] = None

    with_a_failed_run = annealed_speed_up(ends["baseline"], ends["arm"], 1000)
    del ends[lost][1]
    under_way = annealed_speed_up(ends["baseline"], ends["arm"], 1000)

    assert with_a_failed_run.words == "1 of 2 seeds"
    assert under_way.words == "1.00"


def speedups_of(values_by_length: dict[int, list[float]]) -> list[AnnealedSpeedUp]:
    """The speed-ups at each length, with a value for each seed."""
    speedups = []
    for length, values in values_by_length.items():
        tokens = length * TOKENS_PER_STEP
        speedups.append(AnnealedSpeedUp(tokens, dict(enumerate(values))))
    return speedups


def test_the_trend_is_a_t_test_of_the_slopes_of_the_seeds() -> None:
    values = {
        500: [1.5, 1.4, 1.6],
        1000: [1.4, 1.35, 1.45],
        2000: [1.25, 1.3, 1.28],
    }

    result = trend(speedups_of(values))

    x = np.log2([500, 1000, 2000])
    slopes = []
    for seed_values in zip(*values.values(), strict=True):
        line = stats.linregress(x, np.log(seed_values))
        slopes.append(line.slope)
    low, high = np.exp(t_interval(slopes))
    assert result is not None
    assert result.lengths == 3
    mean = np.exp(np.mean(slopes))
    assert result.per_doubling == pytest.approx((mean, low, high))


FALLING = {
    500: [1.5, 1.6, 1.55],
    1000: [1.3, 1.38, 1.35],
    2000: [1.1, 1.2, 1.15],
}
RISING = {
    500: [1.1, 1.2, 1.15],
    1000: [1.3, 1.38, 1.35],
    2000: [1.5, 1.6, 1.55],
}
SCATTERED = {
    500: [1.1, 1.5, 1.3],
    1000: [1.5, 1.1, 1.2],
    2000: [1.2, 1.4, 1.3],
}
ONE_SEED = {500: [1.5], 1000: [1.2]}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (FALLING, "the speed-up falls"),
        (RISING, "the speed-up rises"),
        (SCATTERED, "no change is shown"),
        (ONE_SEED, "without an interval no trend is shown"),
    ],
)
def test_a_trend_claims_what_its_interval_shows(values: dict, sentence: str) -> None:
    result = trend(speedups_of(values))

    assert result is not None
    assert result.words == sentence


def test_one_length_and_lengths_with_bounds_have_no_trend() -> None:
    first, second = speedups_of({500: [1.5, 1.6], 1000: [1.2, 1.3]})
    bounded = AnnealedSpeedUp(second.tokens, second.ratios, frozenset(">"))

    assert trend([first]) is None
    assert trend([first, bounded]) is None
