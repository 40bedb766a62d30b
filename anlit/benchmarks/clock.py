"""Time, clocks, power and memory of a call, the peak rate of a device, and the compiler at the start of a benchmark."""

import ctypes
import time
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PEAK_SIZE = {"cuda": 8192, "cpu": 1024}
TRIALS = 10


def seconds_of(call: Callable[[], Any], device: torch.device, repeats: int = 1) -> float:
    """Mean time of a call; on a GPU by its own clock."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begin) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1000 / repeats


@cache
def tells_clocks(device: torch.device) -> bool:
    """Whether the device tells its clocks: a GPU, if the package nvidia-ml-py is installed."""
    return device.type == "cuda" and find_spec("pynvml") is not None


def clocks(device: torch.device) -> dict[str, float]:
    """The GPU's clock in MHz and its power in W at this moment; empty where nothing tells them."""
    if not tells_clocks(device):
        return {}
    return {"mhz": torch.cuda.clock_rate(device), "watts": torch.cuda.power_draw(device) / 1000}


def peak_bytes(call: Callable[[], Any], kept: Iterable[Tensor], device: torch.device) -> int | None:
    """The peak memory of a call in bytes: `kept`, and what it allocates in addition.

    On a GPU the allocator counts, on Linux the kernel counts the pages of the process. On other systems it is None.
    """
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before + sum(storages.values())
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # freed memory that the process kept would hide what the call takes
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
        before = _status_bytes("VmRSS")
        call()
        return _status_bytes("VmHWM") - before + sum(storages.values())
    except (OSError, AttributeError):
        return None


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def matrix_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a product of square matrices, the best of ten."""
    size = PEAK_SIZE[device.type]
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    best = min(seconds_of(lambda: a @ b, device) for _ in range(TRIALS))
    return float(2 * size**3 / best)


def prepare_compiler() -> None:
    """Raise the limits of compilations, once before a benchmark begins.

    Blocks of several models share their code, and each model, shape and kind of pass is a separate compilation. Beyond
    the limit code would run uncompiled and be timed, so it fails instead.
    """
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
    torch._dynamo.config.fail_on_recompile_limit_hit = True
