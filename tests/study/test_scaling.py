"""The fit recovers the true exponents within its intervals; test_sections.py has exact losses."""

import numpy as np
import pytest

from anlit.study.sections import scaling
from anlit.study.sections.scaling import (
    best_split,
    exponents,
    fit_with_bootstrap,
    interval,
    loss_of_compute,
    predicted_loss,
)

TRUE = np.array([1.69, 406.4, 410.7, 0.34, 0.28])


def runs(noise: float = 0.0) -> np.ndarray:
    """Parameters, tokens, losses of a grid of six sizes and five lengths, with relative noise."""
    sizes = np.geomspace(1e6, 1e9, 6)
    lengths = np.geomspace(2e7, 2e10, 5)
    n = np.tile(sizes, 5)
    d = np.repeat(lengths, 6)
    random = np.random.default_rng(1)
    factor = 1 + noise * random.standard_normal(n.size)
    losses = predicted_loss(TRUE, n, d) * factor
    return np.stack([n, d, losses])


def test_the_intervals_hold_the_true_exponents() -> None:
    laws = fit_with_bootstrap(runs(0.003), resamples=60)

    true_exponents = exponents(TRUE)
    for name, values in exponents(laws).items():
        low, high = interval(values)
        assert low < true_exponents[name] < high, name
        assert high - low < 0.2
    true_loss = loss_of_compute(TRUE, 1e18)
    low, high = interval(loss_of_compute(laws, 1e18))
    assert low < true_loss < high


def test_the_best_split_is_a_minimum_and_keeps_to_the_compute() -> None:
    for flops in (1e17, 1e21):
        n, d = best_split(TRUE, flops)

        best = loss_of_compute(TRUE, flops)
        larger = predicted_loss(TRUE, 1.1 * n, d / 1.1)
        smaller = predicted_loss(TRUE, n / 1.1, 1.1 * d)
        assert 6 * n * d == pytest.approx(flops)
        assert best < larger
        assert best < smaller


def test_the_loss_above_its_floor_is_a_power_of_the_compute() -> None:
    floor = TRUE[0]
    less, more = loss_of_compute(TRUE, np.array([1e18, 1e20])) - floor

    exponent = np.log(less / more) / np.log(100)
    assert exponent == pytest.approx(exponents(TRUE)["L(C) − E ∝ C^−"])


def test_an_exponent_whose_interval_ends_at_a_limit_of_the_fit_is_not_determined() -> None:
    """Nor are the values that follow from it."""
    laws = np.tile(TRUE[:, None], 41)
    a, b, *_ = scaling._cells(laws)
    assert a == "0.340 (0.340 … 0.340)"
    assert b == "0.280 (0.280 … 0.280)"
    for limit in (0.01, 3.0):
        laws[3, 1:4] = limit

        a, b, best_size, loss, floor = scaling._cells(laws)

        for cell in (a, best_size, loss):
            assert cell == scaling.UNDETERMINED
        assert b == "0.280 (0.280 … 0.280)"
        assert floor == "1.690 (1.690 … 1.690)"


def test_too_few_runs_are_refused() -> None:
    five_runs = runs()[:, :5]
    with pytest.raises(ValueError, match="six runs or more"):
        scaling.fit_law(five_runs)

    runs_of_a_size = runs()
    runs_of_a_size[0] = 1e6
    with pytest.raises(ValueError, match="three sizes"):
        scaling.fit_law(runs_of_a_size)
