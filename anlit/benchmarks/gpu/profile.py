"""Where a training step spends the device's time, kernel by kernel.

python -m anlit.benchmarks.gpu.profile --output DIR [--preset h200] [--model anGPT]

The trace, for Perfetto, stays in DIR with the table.
"""

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from anlit.benchmarks.clock import seconds_of
from anlit.benchmarks.options import device_of, parser_of
from anlit.benchmarks.our_step import MODELS, OurStep
from anlit.benchmarks.record import Record, Table
from anlit.benchmarks.step import PRESETS
from anlit.models.runtime import Runtime

WARM_UP, STEPS, SHOWN = 5, 3, 40


def main(argv: list[str]) -> int:
    parser = parser_of("profile", __doc__, "--preset h200", PRESETS)
    parser.add_argument("--model", choices=list(MODELS), default="anGPT")
    given = parser.parse_args(argv)
    device = device_of(given)
    size = PRESETS[given.preset].size
    step = OurStep(given.model, size, device, Runtime(compile=device.type == "cuda"))
    for _ in range(WARM_UP):
        step.train()
    seconds = seconds_of(step.train, device, STEPS)
    record = Record("profile", argv, given.output, device, model=given.model, size=size.as_json(), seconds=seconds)
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            step.train()
        if on_gpu:
            torch.cuda.synchronize()
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, time_of))
    kernels = [{"name": event.key, "calls": event.count / STEPS, "ms": getattr(event, time_of) / STEPS / 1e3}
               for event in events if getattr(event, time_of) > 0]  # fmt: skip
    record.keep(kernels=kernels)
    profiler.export_chrome_trace(str(record.path("trace")))
    busy = sum(kernel["ms"] for kernel in kernels)
    title = f"{given.model}, {size.title}: {1e3 * seconds:.4g} ms a step, of which {busy:.4g} ms in what is listed"
    rows = [[kernel["name"][:90], f"{kernel['calls']:g}", f"{kernel['ms']:.3f}", f"{kernel['ms'] / busy:.1%}"]
            for kernel in kernels[:SHOWN]]  # fmt: skip
    record.finish([Table(title, ("kernel", "a step", "ms a step", "share"), rows)])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
