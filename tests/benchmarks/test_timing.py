"""Taking turns: the order, what counts, what is paired, and a GPU whose clock changes."""

import json
import math
import time
from argparse import Namespace
from pathlib import Path
from unittest import mock

import pytest
import torch

from anlit.benchmarks import harness
from anlit.benchmarks.harness import Benchmark, Group, Ready
from anlit.benchmarks.timing import alternate, paired_ratio, peak_bytes, quartiles
from anlit.compare.statistics import Interval, median_with_interval, product


def test_each_round_begins_with_another_until_one_is_the_last() -> None:
    calls: list[str] = []
    candidates = {name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}
    assert alternate(candidates, 3) == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}
    assert "".join(calls) == "abc" + "bca" + "cab"
    over = time.monotonic() - 1
    assert alternate({"a": lambda: 1}, 5, over) == {"a": [1]}
    assert alternate({"a": lambda: 1}, 5, over + 3600, lambda results: len(results["a"]) == 2) == {
        "a": [1, 1]
    }


def benchmark(folder: Path) -> Benchmark:
    return Benchmark(
        "step", [], Namespace(output=str(folder), rounds=9, minutes=1, device=torch.device("cpu"))
    )


@pytest.mark.parametrize(("cold", "throttled"), [(2.0, 1.0), (1.0, 1.3)])
def test_a_gpu_is_timed_when_it_is_warm_and_marked_if_its_clock_changes(
    cold: float, throttled: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates of 1 and 2 s on a GPU that is slower while it warms up, or in every third round."""
    calls: list[float] = []

    def slowness() -> float:
        return (
            1
            + (cold - 1) * math.exp(-len(calls) / 8)
            + (throttled - 1) * (len(calls) // 2 % 3 == 0)
        )

    def call(seconds: float) -> float:
        calls.append(seconds)
        return seconds * slowness()

    monkeypatch.setattr(
        harness, "clocks", lambda device: {"mhz": 1980 / slowness(), "watts": 690.0}
    )
    monkeypatch.setattr(harness, "seconds_of_calls", lambda call, device, repeats=1: call())
    monkeypatch.setattr(harness, "peak_bytes", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    tried = benchmark(tmp_path)
    tried.device = torch.device("cuda")
    rows = [{"label": "a", "s": 1}, {"label": "b", "s": 2}]
    tried.measure([Group("steps", lambda row, _: Ready({"train": lambda: call(row["s"])}), rows)])
    tried.publish("first")
    (group,) = json.loads((tmp_path / "step.json").read_text())["groups"]
    tables, (fast, slow) = (tmp_path / "step.md").read_text(), group["rows"]
    assert group["warm"] is fast["seconds"]["train"]["steady"] is (throttled == 1)
    assert "| MHz, W |" in tables
    marks = ("| a | 1000* |", "* quartiles more than 5 % apart", "the clocks did not settle")
    assert [mark in tables for mark in marks] == [throttled > 1] * 3
    if throttled == 1:
        assert [row["seconds"]["train"]["median"] for row in (fast, slow)] == pytest.approx(
            [1.0, 2.0], rel=0.02
        )
        assert slow["clocks"] == {"mhz": pytest.approx(1980, rel=0.02), "watts": 690}


def test_a_killed_run_leaves_its_rounds(tmp_path: Path) -> None:
    call = mock.Mock(side_effect=[None] * 8 + [KeyboardInterrupt])
    group = Group("a", lambda *_: Ready({"train": call}, turn_seconds=0), [{"label": "a"}])
    with pytest.raises(KeyboardInterrupt):
        benchmark(tmp_path).measure([group])
    record = json.loads((tmp_path / "step.json").read_text())
    assert not record["finished"]
    assert (
        len(record["groups"][0]["rows"][0]["seconds"]["train"]["values"]) == 6
    )  # two calls before the rounds


def test_ratios_are_of_the_same_round_and_intervals_those_of_the_tables() -> None:
    """Of order statistics: n = 10 gives the 2nd and 9th value, n = 15 the 4th and 12th."""
    assert paired_ratio([2.0, 20.0, 50.0], [1.0, 10.0, 100.0]) == pytest.approx(
        (2.0, math.nan, math.nan), nan_ok=True
    )
    assert quartiles([1.0, 2.0, 4.0])["quartiles"] == [1.5, 3.0]
    assert median_with_interval([float(n) for n in range(10, 0, -1)]) == (5.5, 2.0, 9.0)
    assert median_with_interval([float(n) for n in range(1, 16)]) == (8.0, 4.0, 12.0)
    narrow = Interval(2.0, 1.0, 4.0)
    assert product(narrow, Interval(3.0, 3.0, 3.0)) == pytest.approx((6.0, 3.0, 12.0))
    assert product(narrow, narrow) == pytest.approx((4.0, 4 / 2**2**0.5, 4 * 2**2**0.5))


def test_memory_of_a_call() -> None:
    kept = torch.zeros(10_000_000)
    peak = peak_bytes(lambda: torch.ones(20_000_000).sum(), [kept, kept[:10]], torch.device("cpu"))
    assert peak is None or peak == pytest.approx(
        120e6, rel=0.1
    )  # None where the system does not tell
