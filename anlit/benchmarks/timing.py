"""Time, clocks and memory of calls. Candidates take turns, so that other work of the machine slows all of them."""

import ctypes
import re
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from anlit.compare.statistics import Interval, median_with_interval

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")
Seconds = Mapping[str, float]
"""Seconds by kind, such as forward and both."""

PEAK_SIZE, PEAK_TRIALS = {"cuda": 8192, "cpu": 1024}, 5
AGREEMENT, LAST, MOST_WARM_UP = 0.02, 3, 50
"""A warm-up ends when the last 3 times of every candidate lie within 2 %, or after 50 rounds."""
STEADY = 0.05
"""Quartiles further apart than this share of the median are marked: the speed changed while it was measured."""


def clocks(device: torch.device) -> dict[str, float]:
    """A GPU's clock in MHz and its power in W now; empty on other devices and without the package nvidia-ml-py."""
    if device.type != "cuda" or find_spec("pynvml") is None:
        return {}
    return {"mhz": torch.cuda.clock_rate(device), "watts": torch.cuda.power_draw(device) / 1000}


def seconds_of_calls(call: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Mean seconds of a call; on one CPU thread those of the processor, in which other programs have no part."""
    is_one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if is_one_thread else time.perf_counter

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    begin = clock()
    for _ in range(repeats):
        call()
    wait()
    return (clock() - begin) / repeats


def alternate(
    candidates: Mapping[Name, Callable[[], Result]],
    rounds: int,
    deadline: float = float("inf"),
    after_round: Callable[[dict[Name, list[Result]]], bool | None] = lambda results: None,
) -> dict[Name, list[Result]]:
    """The results of all candidates, each called once in every round. Each round begins with another candidate.

    Args:
        rounds: Rounds, at most.
        deadline: After this `time.monotonic()` no round begins, except the first.
        after_round: Gets all results so far after each round. If it returns True, no other round begins.
    """
    names = list(candidates)
    results: dict[Name, list[Result]] = {name: [] for name in names}
    for turn in range(rounds if names else 0):
        if turn and time.monotonic() > deadline:
            break
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            results[name].append(candidates[name]())
        if after_round(results):
            break
    return results


def warm_up(candidates: Mapping[Name, Callable[[], Seconds]], deadline: float) -> bool:
    """Let the candidates take turns until the last times of each agree; returns whether they do.

    A GPU lowers its clock while it warms up, and once more when it reaches its power limit.
    """

    def agree(results: dict[Name, list[Seconds]]) -> bool:
        lasts = [
            [times[kind] for times in turns[-LAST:]]
            for turns in results.values()
            for kind in turns[0]
        ]
        return all(len(last) == LAST and max(last) <= (1 + AGREEMENT) * min(last) for last in lasts)

    return agree(alternate(candidates, MOST_WARM_UP, deadline, agree))


def paired_ratio(times: Sequence[float], others: Sequence[float]) -> Interval:
    """The median over rounds of the ratios of times, with its 95 % interval."""
    return median_with_interval([mine / other for mine, other in zip(times, others, strict=True)])


def quartiles(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and the values themselves, as a record keeps them; and whether they are steady."""
    low, middle, high = (float(value) for value in np.percentile(values, (25, 50, 75)))
    return {
        "median": middle,
        "quartiles": [low, high],
        "steady": high - low <= STEADY * middle,
        "values": list(values),
    }


def peak_bytes(call: Callable[[], Any], kept: Iterable[Tensor], device: torch.device) -> int | None:
    """The peak memory of a call in bytes: `kept`, and what it allocates in addition.

    On a GPU the allocator counts, on Linux the kernel counts the pages of the process. On other systems it is None.
    """
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept
    }
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before + sum(storages.values())

    def status_bytes(field: str) -> int:
        return 1024 * int(
            re.findall(rf"{field}:\s*(\d+)", Path("/proc/self/status").read_text())[0]
        )

    try:
        ctypes.CDLL("libc.so.6").malloc_trim(
            0
        )  # freed memory that the process kept would hide what the call takes
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
        before = status_bytes("VmRSS")
        call()
        return status_bytes("VmHWM") - before + sum(storages.values())
    except (OSError, AttributeError):
        return None


def matrix_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a product of square matrices, the best of five."""
    size = PEAK_SIZE[device.type]
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / min(seconds_of_calls(lambda: a @ b, device) for _ in range(PEAK_TRIALS))
