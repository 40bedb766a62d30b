"""The provenance of numbers: commit, versions and hardware, for the record of every result."""

import os
import platform
import re
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from anlit.io.cores import cores

PACKAGE_FOLDER = Path(__file__).parents[1]
"""The folder of anlit."""
PACKAGES = (
    "anlit",
    "torch",
    "lightning",
    "litdata",
    "jsonargparse",
    "torchmetrics",
    "tokenizers",
    "numpy",
    "scipy",
    "pyarrow",
    "zstandard",
    "flash-attn",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "triton",
)
"""Packages that influence a result or its speed."""


def environment() -> dict[str, Any]:
    """Return the beginning of every record. Call it before measuring: it has the load."""
    return {
        "when": utc_time(),
        "git": git_state(),
        "versions": versions(),
        "hardware": machine(),
        "load_before": os.getloadavg()[0],
    }


def utc_time() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that influence a result."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def git_state() -> dict[str, Any] | None:
    """Return the commit of the running code, and whether a tracked file differs from it.

    Outside a checkout the commit is ANLIT_COMMIT of an image, or None without it.
    """
    try:
        # Exclude another project's checkout around site-packages.
        _run_git("ls-files", "--error-unmatch", "__init__.py")
        changed_files = _run_git("status", "--porcelain", "--untracked-files=no")
        return {"commit": _run_git("rev-parse", "HEAD"), "dirty": bool(changed_files)}
    except (OSError, subprocess.CalledProcessError):
        commit = os.environ.get("ANLIT_COMMIT")
        return {"commit": commit, "dirty": commit.endswith("-dirty")} if commit else None


def _run_git(*arguments: str) -> str:
    process = subprocess.run(
        ["git", *arguments], cwd=PACKAGE_FOLDER, capture_output=True, encoding="utf-8", check=True
    )
    return process.stdout.strip()


def machine() -> dict[str, Any]:
    """Return {cpu, cores, memory_gb, system} of this machine, with the usable cores."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": processor_name(),
        "cores": cores(),
        "memory_gb": round(memory_bytes / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def processor_name() -> str:
    """Return the processor's model name."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model_name = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    if model_name is not None:
        return model_name[1]
    return platform.processor() or platform.machine()
