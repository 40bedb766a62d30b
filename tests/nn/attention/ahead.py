"""Compiles kernels without a GPU, in a process of their own.

The interpreter may have replaced Triton's compiler in this process.
"""

import os
import subprocess
import sys
from typing import Any

SHARED = {80: 166_912, 90: 232_448}
"""Bytes of shared memory that a program can have on an A100 and on an H100."""


def compile_kernels(tool: str, **options: Any) -> list[dict[str, Any]]:
    """A record per kernel: capability, kernel, and the numbers that a tool here prints."""
    command = [sys.executable, "-m", f"tests.nn.attention.{tool}"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    records = []
    for line in process.stdout.splitlines():
        if line.startswith("sm_"):
            records.append(read_record(line))
    return records


def read_record(line: str) -> dict[str, Any]:
    """Read `sm_80 … forward: registers 255  stack 0 …`."""
    labels, _, numbers = line.partition(": ")
    capability, *_, kernel = labels.split()
    record: dict[str, Any] = {"capability": int(capability.removeprefix("sm_")), "kernel": kernel}
    words = numbers.split()
    for name, number in zip(words[::2], words[1::2], strict=True):
        record[name] = int(number)
    return record
