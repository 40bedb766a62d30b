"""`run.json` in the run folder: what ran, on what, with which data, and how it ended."""

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only

import anlit

PACKAGES = (
    "torch",
    "lightning",
    "litdata",
    "jsonargparse",
    "torchmetrics",
    "tokenizers",
    "numpy",
    "flash-attn",
)


class RunRecord(L.Callback):
    """Writes versions, git commit, command, hardware, data fingerprint, parameter count and the run's status.

    Args:
        run_dir: The run folder.
    """

    def __init__(self, run_dir: str) -> None:
        self.path = Path(run_dir) / "run.json"
        self.record: dict[str, Any] = {}

    @rank_zero_only
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        decoder: Any = pl_module.model
        data = getattr(trainer, "datamodule", None)
        earlier = json.loads(self.path.read_text()) if self.path.is_file() else {}
        self.record = {
            "anlit": anlit.__version__,
            "versions": versions(),
            "git": git_state(),
            "command": shlex.join(["anlit", *sys.argv[1:]]),
            "hardware": hardware(trainer),
            "data": data.fingerprint if data is not None else None,
            "architecture": type(pl_module).__name__,
            "parameters": decoder.n_parameters(),
            "status": "running",
            "started": earlier.get("started") or _now(),
            "resumed": [*earlier.get("resumed", []), _now()] if earlier else [],
            "ended": None,
            "error": None,
        }
        self._write()

    @rank_zero_only
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.record |= {"status": "finished", "ended": _now()}
        self._write()

    @rank_zero_only
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if not self.record:
            return
        status = "interrupted" if isinstance(exception, KeyboardInterrupt) else "failed"
        self.record |= {
            "status": status,
            "ended": _now(),
            "error": f"{type(exception).__name__}: {exception}",
        }
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.record, indent=2) + "\n")
        os.replace(partial, self.path)


def versions() -> dict[str, str]:
    """Python's version and those of the installed packages that decide a result."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any] | None:
    """Commit of the code that runs and whether a tracked file differs from it; None where neither is known.

    Outside anlit's checkout it is what an image says of itself in ANLIT_COMMIT (docker/Dockerfile).
    """
    where = Path(anlit.__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=True).stdout

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # not some other project's checkout around site-packages
        return {
            "commit": git("rev-parse", "HEAD").strip(),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no").strip()),
        }
    except (OSError, subprocess.CalledProcessError):
        commit = os.environ.get("ANLIT_COMMIT")
        return {"commit": commit, "dirty": commit.endswith("-dirty")} if commit else None


def hardware(trainer: L.Trainer) -> dict[str, Any]:
    """Processor, cores, memory in GB, ranks and the name of each rank's device."""
    on_cuda = trainer.strategy.root_device.type == "cuda"
    return {
        "cpu": _processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "devices": [torch.cuda.get_device_name(trainer.strategy.root_device) if on_cuda else "cpu"]
        * trainer.world_size,
    }


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
