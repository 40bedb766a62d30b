"""The GPU, its driver and libraries, and what it does at most: `python -m anlit.benchmarks.gpu.device --output DIR`."""

import argparse
import subprocess
import sys
from typing import Any

import torch

from anlit.benchmarks.clock import TRIALS, matrix_peak, seconds_of
from anlit.benchmarks.record import Record, Table

ASKED = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,memory.total,temperature.gpu"
PRECISIONS = {"cuda": (torch.bfloat16, torch.float16, torch.float32), "cpu": (torch.float32,)}
COPIED = {"cuda": 2**32, "cpu": 2**24}
"""Bytes."""


def facts(device: torch.device) -> dict[str, Any]:
    """What torch and the driver tell."""
    found: dict[str, Any] = {"cuda": torch.version.cuda, "build": torch.__config__.show()}
    if device.type == "cuda":
        found |= {"device": str(torch.cuda.get_device_properties(device)), "cudnn": torch.backends.cudnn.version()}
        try:
            asked = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"]
            found["driver"] = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError) as error:
            found["driver"] = str(error)
    return found


def copy_rate(device: torch.device) -> float:
    """Bytes read and written per second by a copy on the device, the best of ten."""
    source = torch.randint(0, 255, (COPIED[device.type],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / min(seconds_of(lambda: target.copy_(source), device) for _ in range(TRIALS))


def launch_seconds(device: torch.device) -> float:
    """Of one of many small operations in a row, which the host is slower to ask for than a GPU to do."""
    small = torch.zeros(8, device=device)
    return min(seconds_of(lambda: small.add_(1), device, 1000) for _ in range(TRIALS))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("--output", required=True, metavar="DIR")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = Record("device", argv, parser.parse_args(argv).output, device, facts=facts(device))
    rates = {f"products in {str(dtype).removeprefix('torch.')}, TFLOP/s": matrix_peak(device, dtype) / 1e12
             for dtype in PRECISIONS[device.type]}  # fmt: skip
    rates["copies, GB/s read and written"] = copy_rate(device) / 1e9
    rates["a small operation, µs"] = 1e6 * launch_seconds(device)
    record.keep(rates=rates)
    record.finish([Table("At most", ("", "measured"), [[name, f"{value:.3g}"] for name, value in rates.items()])])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
