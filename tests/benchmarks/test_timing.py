"""Taking turns: the order, what counts, what is paired, and a GPU whose clock changes."""

import json
import math
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from anlit.analysis.statistics import Interval, median_with_interval, product
from anlit.benchmarks import harness
from anlit.benchmarks.harness import Benchmark, Case, Ready
from anlit.benchmarks.timing import alternate, paired_ratio, peak_bytes, quartiles

CPU = torch.device("cpu")


def test_each_round_begins_with_another_and_is_kept() -> None:
    calls: list[str] = []
    kept: list[int] = []
    candidates = {name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}
    results = alternate(candidates, 3, after_round=lambda results: kept.append(len(results["a"])))
    assert "".join(calls) == "abc" + "bca" + "cab"
    assert results == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}
    assert kept == [1, 2, 3]


def test_when_no_other_round_begins() -> None:
    over = time.monotonic() - 1
    assert alternate({"a": lambda: 1.0}, 5, deadline=over) == {"a": [1.0]}
    assert len(alternate({"a": lambda: 1.0}, 5, deadline=over + 3600)["a"]) == 5
    assert alternate({"a": lambda: 1.0}, 5, after_round=lambda results: len(results["a"]) == 2) == {"a": [1.0, 1.0]}
    assert alternate({}, 2) == {}


class FakeGPU:
    """Slow while it warms up, and slow again in some rounds where it is throttled.

    Args:
        cold: How many times slower it is at first.
        throttled: The same in every third round once it is warm.
    """

    def __init__(self, cold: float, throttled: float = 1.0) -> None:
        self.cold, self.throttled, self.calls = cold, throttled, 0

    def slowness(self) -> float:
        return 1 + (self.cold - 1) * math.exp(-self.calls / 8) + (self.throttled - 1) * (self.calls // 2 % 3 == 0)

    def call(self, seconds: float) -> float:
        self.calls += 1
        return seconds * self.slowness()

    def clocks(self, device: torch.device) -> dict[str, float]:
        return {"mhz": 1980 / self.slowness(), "watts": 690.0}


def timed_on(gpu: FakeGPU, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], str]:
    """The group of two candidates, of 1 and 2 s, and the tables."""
    monkeypatch.setattr(harness, "clocks", gpu.clocks)
    monkeypatch.setattr(harness, "seconds_of_calls", lambda call, device, repeats=1: call())
    monkeypatch.setattr(harness, "peak_bytes", lambda call, kept, device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    benchmark = Benchmark("step", [], Namespace(output=str(folder), rounds=9, minutes=1), CPU)
    benchmark.device = torch.device("cuda")
    cases = [
        Case(name, lambda row, earlier, s=s: Ready({"train": lambda: gpu.call(s)})) for name, s in (("a", 1), ("b", 2))
    ]
    benchmark.measure([("steps", cases)])
    benchmark.publish("first")
    return json.loads((folder / "step.json").read_text())["groups"][0], (folder / "step.md").read_text()


def test_a_gpu_that_warms_up_is_timed_when_it_is_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group, tables = timed_on(FakeGPU(cold=2.0), tmp_path, monkeypatch)
    assert group["warm"]
    fast, slow = group["rows"]
    assert fast["seconds"]["train"]["median"] == pytest.approx(1.0, rel=0.02)
    assert slow["seconds"]["train"]["median"] == pytest.approx(2.0, rel=0.02)
    assert fast["seconds"]["train"]["steady"]
    assert slow["clocks"] == {"mhz": pytest.approx(1980, rel=0.02), "watts": 690}
    assert "| MHz, W |" in tables
    assert "*" not in tables


def test_a_figure_of_a_throttled_gpu_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group, tables = timed_on(FakeGPU(cold=1.0, throttled=1.3), tmp_path, monkeypatch)
    assert not group["warm"]
    assert not group["rows"][0]["seconds"]["train"]["steady"]
    assert "| a | 1000* |" in tables
    assert "* quartiles more than 5 % apart" in tables
    assert "the clocks did not settle" in tables


def test_a_ratio_is_of_the_same_round() -> None:
    assert paired_ratio([2.0, 20.0, 50.0], [1.0, 10.0, 100.0]) == (2.0, 0.5, 2.0)
    assert quartiles([1.0, 2.0, 4.0])["quartiles"] == [1.5, 3.0]


def test_the_interval_of_a_median_is_that_of_the_tables() -> None:
    """Of order statistics: n = 10 gives the 2nd and 9th value, n = 15 the 4th and 12th."""
    assert median_with_interval([float(n) for n in range(10, 0, -1)]) == (5.5, 2.0, 9.0)
    assert median_with_interval([float(n) for n in range(1, 16)]) == (8.0, 4.0, 12.0)
    assert median_with_interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    narrow = Interval(2.0, 1.0, 4.0)
    assert product(narrow, Interval(3.0, 3.0, 3.0)) == pytest.approx((6.0, 3.0, 12.0))
    assert product(narrow, narrow) == pytest.approx((4.0, 4 / 2**2**0.5, 4 * 2**2**0.5))


def test_memory_of_a_call() -> None:
    kept = torch.zeros(10_000_000)
    peak = peak_bytes(lambda: torch.ones(20_000_000).sum(), [kept, kept[:10]], CPU)
    if peak is None:
        pytest.skip("this system does not tell")
    assert peak == pytest.approx(120e6, rel=0.1)
