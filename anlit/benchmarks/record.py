"""What every benchmark needs: trials in fresh processes, medians with their spread, and what they were measured on."""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from anlit.errors import UserError

PACKAGES = ("anlit", "torch", "lightning", "litdata", "tokenizers", "numpy", "pyarrow", "zstandard")
ERROR_LINES = 15


def run_trial(command: Sequence[str], name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Run one measurement in a fresh process, so that none finds what another left in memory.

    Args:
        command: what starts the program; it gets `name` and the arguments as JSON, and prints its result
            as the last line of its output.

    Returns:
        The result, with `process_seconds`, the processor time of the process and of those it started.

    Raises:
        UserError: the program failed.
    """
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    before = os.times()
    process = subprocess.run(
        [*command, name, json.dumps(arguments)], capture_output=True, text=True, env=environment, check=False
    )
    after = os.times()
    lines = process.stdout.strip().splitlines()
    if process.returncode or not lines:
        what = "\n".join([*lines, *process.stderr.strip().splitlines()][-ERROR_LINES:])
        raise UserError(f"The measurement `{' '.join(command)} {name}` ended with {process.returncode}:\n{what}")
    user, system = after.children_user - before.children_user, after.children_system - before.children_system
    return {**json.loads(lines[-1]), "process_seconds": user + system}


def this_python(module: str) -> list[str]:
    """The command that runs one of our modules with the Python that runs now."""
    return [sys.executable, "-m", module]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and greatest of the repetitions."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "values": list(values)}


def environment() -> dict[str, Any]:
    """Versions, commit and hardware behind a result, and how busy the machine was before it began."""
    from anlit.training.callbacks.run_record import git_state

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": git_state(),
        "versions": versions,
        "hardware": {
            "cpu": _processor(),
            "cores": cores(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "system": f"{platform.system()} {platform.release()}",
        },
        "load_before": os.getloadavg()[0],
    }


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
