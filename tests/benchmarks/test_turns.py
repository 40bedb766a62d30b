"""Taking turns: the order, what counts, what is paired, and the interval of a median."""

import time

import pytest
import torch

from anlit.benchmarks.clock import peak_bytes
from anlit.benchmarks.turns import alternate, paired_ratio, quartiles, timed
from anlit.reporting.intervals import Interval, median_with_interval, product

CPU = torch.device("cpu")


def test_each_round_begins_with_another_and_is_kept() -> None:
    calls: list[str] = []
    kept: list[dict[str, int]] = []

    def entrant(name: str):
        return lambda: calls.append(name) or len(calls)

    found = alternate(
        {name: entrant(name) for name in "abc"},
        rounds=3,
        warmup=1,
        after_round=lambda results: kept.append({name: len(values) for name, values in results.items()}),
    )
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert found == {"a": [4, 9, 11], "b": [5, 7, 12], "c": [6, 8, 10]}
    assert kept == [dict.fromkeys("abc", n) for n in (1, 2, 3)]


def test_after_the_deadline_no_round_begins_but_the_first() -> None:
    over = time.monotonic() - 1
    assert alternate({"a": lambda: 1.0}, 5, deadline=over) == {"a": [1.0]}
    assert len(alternate({"a": lambda: 1.0}, 5, deadline=over + 3600)["a"]) == 5
    assert alternate({}, 2) == {}


def test_no_round_begins_after_what_is_enough() -> None:
    assert alternate({"a": lambda: 1.0}, 5, after_round=lambda results: len(results["a"]) == 2) == {"a": [1.0, 1.0]}


def test_seconds_are_those_of_one_call() -> None:
    calls: list[int] = []
    assert timed(lambda: calls.append(time.sleep(0.01) or 1), CPU, repeats=3)() >= 0.01
    assert len(calls) == 3


def test_a_ratio_is_of_the_same_round() -> None:
    assert paired_ratio([2.0, 20.0, 50.0], [1.0, 10.0, 100.0]) == (2.0, 0.5, 2.0)


def test_the_interval_of_a_median() -> None:
    """Against the tables of order statistics: n = 10 gives the 2nd and 9th value, n = 15 the 4th and 12th."""
    assert median_with_interval([float(n) for n in range(10, 0, -1)]) == (5.5, 2.0, 9.0)
    assert median_with_interval([float(n) for n in range(1, 16)]) == (8.0, 4.0, 12.0)
    assert median_with_interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    narrow = Interval(2.0, 1.0, 4.0)
    assert product(narrow, Interval(3.0, 3.0, 3.0)) == pytest.approx((6.0, 3.0, 12.0))
    assert product(narrow, narrow) == pytest.approx((4.0, 4 / 2**2**0.5, 4 * 2**2**0.5))
    assert quartiles([1.0, 2.0, 4.0])["quartiles"] == [1.5, 3.0]


def test_memory_of_a_call() -> None:
    kept = torch.zeros(10_000_000)
    found = peak_bytes(lambda: torch.ones(20_000_000).sum(), [kept, kept[:10]], CPU)
    if found is None:
        pytest.skip("this system does not tell")
    assert found == pytest.approx(120e6, rel=0.1)
