"""The learning rate's shape: values worked out by hand, and its bounds."""

import math

import pytest

from anlit.training.optim.schedule import Schedule


def test_warm_up_rises_linearly_to_the_peak() -> None:
    factors = [Schedule(warmup=0.4, final=0.0).factor(step, 10) for step in range(10)]
    assert factors[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert factors[4] == 1.0
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert [Schedule(warmup, 0.0).factor(0, 1) for warmup in (0.0, 0.2, 0.9)] == [1.0, 1.0, 1.0]
    assert [Schedule(0.9, 0.5).factor(step, 3) for step in range(3)] == pytest.approx(
        [1 / 3, 2 / 3, 1.0]
    )


def test_cosine_halves_in_the_middle_and_ends_at_final() -> None:
    schedule = Schedule(warmup=0.0, final=0.1)
    assert schedule.factor(0, 11) == 1.0
    assert schedule.factor(5, 11) == pytest.approx(0.55)
    assert schedule.factor(10, 11) == schedule.factor(50, 11) == pytest.approx(0.1)
    assert schedule.factor(2, 11) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 5)) / 2)
