"""Where a training step spends its time, kernel by kernel."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from anlit.benchmarks.record import Table

STEPS, SHOWN = 3, 40


def kernels_of(step: Callable[[], Any], trace: Path) -> list[dict[str, Any]]:
    """Profile `STEPS` steps.

    Args:
        step: A step that is warmed up.
        trace: The file for the trace, which Perfetto shows; .json.gz.

    Returns:
        For each kernel, or on a CPU each operator, {name, calls in a step, ms in a step}, the longest first.
    """
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        for _ in range(STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    kernels = [
        {"name": event.key, "calls": event.count / STEPS, "ms": getattr(event, time_of) / STEPS / 1e3}
        for event in profiler.key_averages()
        if getattr(event, time_of) > 0
    ]
    return sorted(kernels, key=lambda kernel: -kernel["ms"])


def kernel_table(row: Mapping[str, Any]) -> Table:
    """The longest kernels of a case's row."""
    busy = sum(kernel["ms"] for kernel in row["kernels"])
    rows = [
        [kernel["name"][:90], f"{kernel['calls']:g}", f"{kernel['ms']:.3f}", f"{kernel['ms'] / busy:.1%}"]
        for kernel in row["kernels"][:SHOWN]
    ]
    return Table(f"{row['label']}: {busy:.4g} ms a step in kernels", ("kernel", "a step", "ms a step", "share"), rows)
