"""Fitted powers and their intervals."""

import numpy as np
import pytest

from anlit.analysis.statistics import power_law


def test_exponents_are_those_of_powers() -> None:
    x = [1.0, 2.0, 4.0, 8.0]
    found = power_law(x, [3 * value**1.5 for value in x])
    assert found is not None
    assert (*found.exponent, found.constant) == pytest.approx((1.5, 1.5, 1.5, 3.0))
    noisy = power_law(x, [1.0, 2.2, 3.7, 8.4])
    assert noisy is not None
    assert noisy.exponent.low < noisy.exponent.median < noisy.exponent.high
    places, logs = np.arange(4) - 1.5, np.log2([1.0, 2.2, 3.7, 8.4])
    slope = places @ logs / (places @ places)
    residuals = logs - logs.mean() - slope * places
    error = np.sqrt(residuals @ residuals / 2 / (places @ places))
    assert noisy.exponent.median == pytest.approx(slope)
    assert noisy.exponent.high - noisy.exponent.median == pytest.approx(
        4.3027 * error, rel=1e-4
    )  # Student's t, two degrees
    assert power_law(x[:2], x[:2]) is None
