"""The fit recovers known exponents within its own intervals; test_report.py has losses without noise."""

import numpy as np
import pytest

from anlit.analysis.study.scaling import Law, fit, fit_law

TRUE = Law(E=1.69, A=406.4, B=410.7, a=0.34, b=0.28)


def runs(noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parameters, tokens and losses of a grid of six sizes and five lengths, with relative noise."""
    n, d = (x.ravel() for x in np.meshgrid(np.geomspace(1e6, 1e9, 6), np.geomspace(2e7, 2e10, 5)))
    noise = 1 + noise * np.random.default_rng(seed).standard_normal(n.size)
    return n, d, TRUE.loss(n, d) * noise


@pytest.mark.parametrize("seed", [1, 2])
def test_the_intervals_hold_the_true_exponents(seed: int) -> None:
    fitted = fit(*runs(0.003, seed), resamples=60)
    for name in ("a", "b", "E", "parameters_exponent", "compute_exponent"):
        low, high = fitted.interval(name)
        assert low < getattr(TRUE, name) < high, name
        assert high - low < 0.2
    low, high = fitted.band(np.array([1e18]))
    assert low < TRUE.loss_of_compute(1e18) < high


def test_an_outlier_hardly_moves_the_fit() -> None:
    n, d, losses = runs(0.0)
    losses[7] *= 1.2
    law = fit_law(n, d, losses)
    assert law.a == pytest.approx(TRUE.a, rel=0.02)
    assert law.b == pytest.approx(TRUE.b, rel=0.02)


def test_the_best_split_is_a_minimum_and_keeps_to_the_compute() -> None:
    for flops in (1e17, 1e21):
        n, d = TRUE.best_split(flops)
        assert 6 * n * d == pytest.approx(flops)
        best = TRUE.loss_of_compute(flops)
        assert best < TRUE.loss(1.1 * n, d / 1.1)
        assert best < TRUE.loss(n / 1.1, 1.1 * d)
    excess = [float(TRUE.loss_of_compute(flops)) - TRUE.E for flops in (1e18, 1e20)]
    assert np.log(excess[0] / excess[1]) / np.log(100) == pytest.approx(TRUE.compute_exponent)


def test_too_few_runs_are_refused() -> None:
    n, d, losses = runs(0.0)
    with pytest.raises(ValueError, match="six runs or more"):
        fit_law(n[:5], d[:5], losses[:5])
    with pytest.raises(ValueError, match="three sizes"):
        fit_law(np.full(30, 1e6), d, losses)
