"""Taking turns: their order, the paired ratios, and a GPU with a changing clock."""

import json
import math
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from anlit.benchmarks import harness, timing
from anlit.benchmarks.harness import Benchmark, CaseGroup, Ready
from anlit.benchmarks.timing import alternate, paired_ratio, peak_bytes, summarize_times
from anlit.compare.statistics import Interval, median_with_interval, product

CPU = torch.device("cpu")


class Counter:
    """Its calls return the number of calls so far, and record their names."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def call(self, name: str) -> int:
        self.names.append(name)
        return len(self.names)


def one() -> int:
    return 1


def test_no_call_always_follows_the_same_one() -> None:
    counter = Counter()
    calls = {}
    for name in "abc":
        calls[name] = partial(counter.call, name)

    results = alternate(calls, 30)

    order = "".join(counter.names)
    rounds = [order[first : first + 3] for first in range(0, 90, 3)]
    assert {"".join(sorted(letters)) for letters in rounds} == {"abc"}
    assert len(set(rounds)) == 6
    assert results["a"] == [number + 1 for number, name in enumerate(order) if name == "a"]


def test_times_count_where_the_driver_does_not_tell_the_power(monkeypatch) -> None:
    """As for a slice of a GPU."""
    monkeypatch.setattr(timing, "is_installed", lambda package: True)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1980)
    monkeypatch.setattr(torch.cuda, "power_draw", mock.Mock(side_effect=RuntimeError))

    assert timing.clocks(torch.device("cuda", 0)) == {}


def test_after_the_deadline_there_is_one_round() -> None:
    deadline = time.monotonic() - 1

    results = alternate({"a": one}, 5, deadline)

    assert results == {"a": [1]}


def test_no_round_follows_once_the_results_are_enough() -> None:
    def are_enough(results: dict[str, list[int]]) -> bool:
        return len(results["a"]) == 2

    results = alternate({"a": one}, 5, after_round=are_enough)

    assert results == {"a": [1, 1]}


def make_benchmark(folder: Path, rounds: int = 9) -> Benchmark:
    options = Namespace(output=str(folder), rounds=rounds, minutes=1, device=CPU)
    return Benchmark("step", [], options)


class SlowGpu:
    """A GPU that is slow while it warms up, or in every third round."""

    def __init__(self, cold: float, throttled: float) -> None:
        self.cold = cold
        self.throttled = throttled
        self.n_calls = 0

    def slowness(self) -> float:
        warming_up = (self.cold - 1) * math.exp(-self.n_calls / 8)
        n_rounds = self.n_calls // 2
        if n_rounds % 3 == 0:
            return self.throttled + warming_up
        return 1 + warming_up

    def call(self, seconds: float) -> float:
        self.n_calls += 1
        return seconds * self.slowness()

    def clocks(self, device: torch.device) -> dict[str, float]:
        return {"mhz": 1980 / self.slowness(), "watts": 690.0}


def measure_on(
    gpu: SlowGpu, folder: Path, monkeypatch: pytest.MonkeyPatch, rounds: int = 9
) -> tuple[dict[str, Any], str]:
    """Return the record and the page of two cases, of 1 and 2 s."""
    monkeypatch.setattr(harness, "clocks", gpu.clocks)
    monkeypatch.setattr(harness, "seconds_of_calls", lambda call, device, repeats=1: call())
    monkeypatch.setattr(harness, "peak_bytes", lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    benchmark = make_benchmark(folder, rounds)
    benchmark.device = torch.device("cuda")

    def build(row: dict[str, Any], earlier_rows: object) -> Ready:
        return Ready({"train": lambda: gpu.call(row["s"])})

    cases = [{"label": "a", "s": 1}, {"label": "b", "s": 2}]
    group = CaseGroup("steps", build, cases)
    benchmark.measure([group])
    benchmark.publish("first")
    page = (folder / "step.md").read_text()
    return read_group(folder), page


def read_record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "step.json").read_text())  # type: ignore[no-any-return]


def read_group(folder: Path) -> dict[str, Any]:
    (group,) = read_record(folder)["groups"]
    return group


MARKS = (
    "| a | 1,000* |",
    "* quartiles more than 5 % apart",
    "the clocks did not settle",
)
"""What a page shows of a GPU with a changing clock."""


def marks_in(page: str) -> list[str]:
    return [mark for mark in MARKS if mark in page]


def test_a_gpu_is_timed_once_it_is_warm(tmp_path: Path, monkeypatch) -> None:
    group, page = measure_on(SlowGpu(cold=2.0, throttled=1.0), tmp_path, monkeypatch)

    assert group["warm"]
    fast, slow = group["rows"]
    fast_times = fast["seconds"]["train"]
    slow_times = slow["seconds"]["train"]
    assert fast_times["steady"]
    assert fast_times["median"] == pytest.approx(1.0, rel=0.02)
    assert slow_times["median"] == pytest.approx(2.0, rel=0.02)
    clocks = slow["clocks"]
    assert clocks["mhz"] == pytest.approx(1980, rel=0.02)
    assert clocks["watts"] == 690
    assert "| MHz, W |" in page
    assert marks_in(page) == []


def test_a_gpu_with_a_changing_clock_is_marked(tmp_path: Path, monkeypatch) -> None:
    group, page = measure_on(SlowGpu(cold=1.0, throttled=1.3), tmp_path, monkeypatch)

    assert not group["warm"]
    row, _ = group["rows"]
    times = row["seconds"]["train"]
    assert not times["steady"]
    assert "| MHz, W |" in page
    assert marks_in(page) == list(MARKS)


def test_a_single_round_takes_no_time_to_warm_up(tmp_path: Path, monkeypatch) -> None:
    """`make gpu` compiles with it, beside other items."""
    gpu = SlowGpu(cold=2.0, throttled=1.0)

    _, page = measure_on(gpu, tmp_path, monkeypatch, rounds=1)

    n_cases = 2
    n_calls_of_a_turn = 3  # it compiles, is timed for the number of repeats, and is timed
    assert gpu.n_calls == n_cases * n_calls_of_a_turn
    assert "the clocks did not settle" in page


def test_a_killed_benchmark_leaves_its_rounds(tmp_path: Path) -> None:
    n_calls_of_the_turn = 2  # before the rounds
    n_rounds = 6
    n_calls = n_calls_of_the_turn + n_rounds
    call = mock.Mock(side_effect=[None] * n_calls + [KeyboardInterrupt])

    def build(*arguments: object) -> Ready:
        return Ready({"train": call}, turn_seconds=0)

    benchmark = make_benchmark(tmp_path)
    group = CaseGroup("a", build, [{"label": "a"}])

    with pytest.raises(KeyboardInterrupt):
        benchmark.measure([group])

    assert not read_record(tmp_path)["finished"]
    (row,) = read_group(tmp_path)["rows"]
    times = row["seconds"]["train"]["values"]
    assert len(times) == n_rounds


def test_ratios_are_paired_by_round() -> None:
    times = [2.0, 20.0, 50.0]
    base_times = [1.0, 10.0, 100.0]

    median, low, high = paired_ratio(times, base_times)

    assert median == 2.0
    assert math.isnan(low)
    assert math.isnan(high)


def test_quartiles_lie_between_the_times() -> None:
    summary = summarize_times([1.0, 2.0, 4.0])

    assert summary["quartiles"] == [1.5, 3.0]


def test_intervals_of_medians_are_order_statistics_as_in_tables() -> None:
    """The 2nd and 9th of 10 values, the 4th and 12th of 15."""
    ten = list(map(float, range(10, 0, -1)))
    fifteen = list(map(float, range(1, 16)))

    interval_of_ten = median_with_interval(ten)
    interval_of_fifteen = median_with_interval(fifteen)

    assert interval_of_ten == (5.5, 2.0, 9.0)
    assert interval_of_fifteen == (8.0, 4.0, 12.0)


def test_the_interval_of_a_product() -> None:
    interval = Interval(2.0, 1.0, 4.0)
    exact = Interval(3.0, 3.0, 3.0)

    scaled = product(interval, exact)
    square = product(interval, interval)

    assert scaled == pytest.approx((6.0, 3.0, 12.0))
    spread = 2**2**0.5
    low = 4 / spread
    high = 4 * spread
    assert square == pytest.approx((4.0, low, high))


def test_peak_memory_is_permanent_tensors_and_allocations() -> None:
    permanent = torch.zeros(10_000_000)

    def call() -> torch.Tensor:
        return torch.ones(20_000_000).sum()

    view = permanent[:10]

    peak = peak_bytes(call, [permanent, view], CPU)

    if peak is None:
        pytest.skip("this system does not count the pages of a process")
    assert peak == pytest.approx(120e6, rel=0.1)
