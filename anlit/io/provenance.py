"""The provenance of numbers: commit, versions and hardware, for the record of every result."""

import os
import platform
import re
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
"""The folder of anlit."""
PACKAGES = (
    "anlit", "torch", "lightning", "litdata", "jsonargparse", "torchmetrics", "tokenizers", "numpy", "scipy", "pyarrow",
    "zstandard", "flash-attn", "flash-attn-4", "nvidia-cutlass-dsl", "triton",
)  # fmt: skip
"""Packages that influence a result or its speed."""


def environment() -> dict[str, Any]:
    """The beginning of every record. Call it before measuring, because it has the load of the machine."""
    return {"when": now(), "git": git_state(), "versions": versions(), "hardware": machine(),
            "load_before": os.getloadavg()[0]}  # fmt: skip


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Python's version and those of the installed packages that influence a result."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def git_state() -> dict[str, Any] | None:
    """The commit of the running code, outside a checkout ANLIT_COMMIT of images, and whether a tracked file differs."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=PACKAGE, capture_output=True, text=True, check=True
        ).stdout

    try:
        git(
            "ls-files", "--error-unmatch", "__init__.py"
        )  # exclude another project's checkout around site-packages
        dirty = git("status", "--porcelain", "--untracked-files=no").strip()
        return {"commit": git("rev-parse", "HEAD").strip(), "dirty": bool(dirty)}
    except (OSError, subprocess.CalledProcessError):
        commit = os.environ.get("ANLIT_COMMIT")
        return {"commit": commit, "dirty": commit.endswith("-dirty")} if commit else None


def machine() -> dict[str, Any]:
    """{cpu, cores, memory_gb, system} of this machine; cores are those that this process may use."""
    memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    return {"cpu": processor_name(), "cores": cores(), "memory_gb": memory,
            "system": f"{platform.system()} {platform.release()}"}  # fmt: skip


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def processor_name() -> str:
    """The processor's model name."""
    path = Path("/proc/cpuinfo")
    names = (
        re.findall(r"^model name\s*:\s*(.*)$", path.read_text(), re.MULTILINE)
        if path.is_file()
        else ()
    )
    return next(iter(names), platform.processor() or platform.machine())
