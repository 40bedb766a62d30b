"""E Σ w² of independent normal scores, against an integral, at its limits, and for heads that differ."""

import math

import pytest
import torch
from scipy import integrate
from scipy.stats import norm
from torch import Tensor

from anlit import ALiBi, Plain, SlidingWindow
from anlit.attention.gaussian import expected_participation
from anlit.attention.mechanism import Mechanism


class Scaled(Mechanism):
    """g(n) = g, any constant."""

    def __init__(self, g: float) -> None:
        super().__init__()
        self.g = g

    def gain(self, n: Tensor) -> Tensor:
        return torch.full_like(n, self.g)


@pytest.mark.parametrize("g", [0.3, 1.0, 3.0])
def test_two_keys_are_an_integral_over_their_difference(g) -> None:
    """w₁ = σ(d), d ~ N(0, 2g²): E[w₁² + w₂²] = E[(1 + e^{−2|d|})/(1 + e^{−|d|})²]."""

    def density(z: float) -> float:
        small = math.exp(-g * math.sqrt(2) * z)
        return 2 * float(norm.pdf(z)) * (1 + small**2) / (1 + small) ** 2

    exact = integrate.quad(density, 0, 1 / g)[0] + integrate.quad(density, 1 / g, 40)[0]
    assert expected_participation(Scaled(g), torch.tensor([2])).item() == pytest.approx(exact, rel=3e-3)


def test_weights_are_equal_without_a_gain_and_one_with_a_large_one() -> None:
    n = torch.tensor([1, 2, 30, 5000])
    assert expected_participation(Scaled(0.0), n)[0].tolist() == pytest.approx((1 / n).tolist())
    assert (expected_participation(Scaled(1e6), n) > 0.999).all()


def test_each_head_by_its_own_slope_and_a_window_by_its_width() -> None:
    heads = expected_participation(ALiBi().for_layer(4, 16, 0), torch.tensor([1, 50]))
    assert heads.shape == (4, 2)
    assert (heads[:, 0] == 1).all()
    assert (heads[:-1, 1] > heads[1:, 1]).all(), "a steeper slope leaves fewer keys"
    n = torch.tensor([3, 40])
    narrow, plain = (expected_participation(m.for_layer(2, 16, 0), n) for m in (SlidingWindow(3), Plain()))
    assert narrow[0, 1].item() == pytest.approx(plain[0, 0].item(), rel=0.01)
    assert narrow[0, 1] > 5 * plain[0, 1]
