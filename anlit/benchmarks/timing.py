"""Time, clock and memory of calls, which take turns: other programs slow all of them alike."""

import ctypes
import random
import re
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from anlit.compare.statistics import Interval, median_with_interval
from anlit.packages import is_installed

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")
Results = dict[Name, list[Result]]
"""The results of every call, by round."""
Seconds = Mapping[str, float]
"""Seconds by kind, such as forward and both."""

PEAK_SIZE = {"cuda": 8192, "cpu": 1024}
"""Rows of the square matrices that measure the peak, by type of device."""
PEAK_TRIALS = 5
AGREEMENT = 0.02
"""A warm-up ends when the last times of every call lie within this share."""
AGREEING_ROUNDS = 3
"""The number of last times that have to agree."""
MAX_WARM_UP_ROUNDS = 50
"""Rounds of a warm-up, at most."""
STEADY = 0.05
"""Quartiles further apart than this share of the median are marked: the speed changed meanwhile."""


def clocks(device: torch.device) -> dict[str, float]:
    """Return a GPU's present clock in MHz and power in W.

    The result is empty on other devices, without the package nvidia-ml-py, and where NVIDIA's
    driver does not tell them, as for a slice of a GPU (MIG).
    """
    if device.type != "cuda" or not is_installed("pynvml"):
        return {}
    try:
        return {"mhz": torch.cuda.clock_rate(device), "watts": torch.cuda.power_draw(device) / 1000}
    except Exception:  # torch's errors, and those of a package that may be missing
        return {}


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of_calls(call: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Return the mean seconds of a call.

    On one CPU thread these are processor seconds, which other programs do not change.
    """
    has_one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if has_one_thread else time.perf_counter
    wait_for(device)
    start = clock()
    for _ in range(repeats):
        call()
    wait_for(device)
    return (clock() - start) / repeats


def alternate(
    calls: Mapping[Name, Callable[[], Result]],
    rounds: int,
    deadline: float = float("inf"),
    after_round: Callable[[Results[Name, Result]], bool | None] = lambda results: None,
) -> Results[Name, Result]:
    """Call each function once a round and return all results.

    The order of a round is random, and the same at every call of this function. A GPU's clock
    depends on the power of the work before, so that no call may always follow the same one.

    Args:
        rounds: Rounds, at most.
        deadline: After this `time.monotonic()` no round starts, except the first.
        after_round: Gets all results so far after each round. If it returns True, no round follows.
    """
    names = list(calls)
    results: Results[Name, Result] = {name: [] for name in names}
    if not names:
        return results
    for number in range(rounds):
        if number > 0 and time.monotonic() > deadline:
            break
        for name in random.Random(number).sample(names, len(names)):
            results[name].append(calls[name]())
        if after_round(results):
            break
    return results


def warm_up(turns: Mapping[Name, Callable[[], Seconds]], deadline: float) -> bool:
    """Repeat rounds until the last times of each turn agree. Return whether they do.

    A GPU lowers its clock while it warms up. It lowers it again at its power limit.
    """
    return have_settled(alternate(turns, MAX_WARM_UP_ROUNDS, deadline, have_settled))


def have_settled(results: Mapping[Any, Sequence[Seconds]]) -> bool:
    """Return whether the last times of each kind and each call agree."""
    for rounds in results.values():
        last_rounds = rounds[-AGREEING_ROUNDS:]
        if len(last_rounds) < AGREEING_ROUNDS:
            return False
        for kind in rounds[0]:
            times = [seconds[kind] for seconds in last_rounds]
            if max(times) > (1 + AGREEMENT) * min(times):
                return False
    return True


def paired_ratio(times: Sequence[float], base_times: Sequence[float]) -> Interval:
    """Return the median over rounds of the ratio of times, with its 95 % interval."""
    pairs = zip(times, base_times, strict=True)
    return median_with_interval([seconds / base_seconds for seconds, base_seconds in pairs])


def summarize_times(values: Sequence[float]) -> dict[str, Any]:
    """Return median, quartiles and values as a record has them, and whether they are steady."""
    low, middle, high = (float(value) for value in np.percentile(values, (25, 50, 75)))
    return {
        "median": middle,
        "quartiles": [low, high],
        "steady": high - low <= STEADY * middle,
        "values": list(values),
    }


def peak_bytes(
    call: Callable[[], Any], permanent: Iterable[Tensor], device: torch.device
) -> int | None:
    """Return the peak memory of a call: its `permanent` tensors and its allocations, in bytes.

    torch's allocator counts on a GPU, and the kernel of Linux counts the pages of the process.
    The result is None on other systems.
    """
    storages = {}
    for tensor in permanent:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    permanent_bytes = sum(storages.values())
    if device.type == "cuda":
        return permanent_bytes + _allocated_on_gpu(call, device)
    try:
        return permanent_bytes + _allocated_on_cpu(call)
    except (OSError, AttributeError):
        return None


def _allocated_on_gpu(call: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - start


def _allocated_on_cpu(call: Callable[[], Any]) -> int:
    # Freed memory that the process has not returned would hide allocations of the call.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM
    start = _process_bytes("VmRSS")
    call()
    return _process_bytes("VmHWM") - start


def _process_bytes(field: str) -> int:
    """Return a field of Linux's account of this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    kibibytes = re.findall(rf"{field}:\s*(\d+)", status)[0]
    return 1024 * int(kibibytes)


def matrix_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a product of square matrices, the best of five."""
    size = PEAK_SIZE[device.type]
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    trials = [seconds_of_calls(lambda: a @ b, device) for _ in range(PEAK_TRIALS)]
    return 2 * size**3 / min(trials)
