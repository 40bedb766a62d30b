"""Calls of `make gpu` with toy plans and imitated programs."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HAS_TOOLS = all(map(shutil.which, ("make", "timeout", "bash")))

NVIDIA_SMI = """#!/bin/sh
case "$1" in
*=name,driver*) echo "NVIDIA H200, 580.159.04, 1980, 345, 700.00" ;;
*=memory.total) echo 143771 ;;
*) echo "NVIDIA H200" ;;
esac
"""
NVIDIA_SMI_WITHOUT_A_GPU = """#!/bin/sh
echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
exit 9
"""
PRINTED_PLAN = """\
The plan: 350 s at most, in calls of 540 s.
   0–170 s  fails
 170–230 s  gpu
 230–290 s  unable
 290–350 s  last
"""
GPU_OF_THE_PAGE = (
    "NVIDIA H200, driver 580.159.04, clock 1980 MHz at most, 345 MHz at the start, 700.00 W;"
)


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def with_programs(folder: Path) -> dict[str, str]:
    """Return the environment with these programs first."""
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def start(
    folder: Path, *options: str, minutes: float = 9, nvidia_smi: str = NVIDIA_SMI
) -> subprocess.Popen[str]:
    """Start a call in a new process group, on a machine with this program nvidia-smi."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    write_program(programs / "nvidia-smi", nvidia_smi)
    command = [sys.executable, "docker/gpu.py", f"--minutes={minutes}", f"--plan={folder}/plan.py"]
    for name in ("state", "output", "wheels"):
        command.append(f"--{name}={folder / name}")
    return subprocess.Popen(
        [*command, *options],
        cwd=ROOT,
        env=with_programs(programs),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def call(folder: Path, *options: str, **settings: Any) -> tuple[int, str]:
    """Return the exit code and the output of a call."""
    process = start(folder, *options, **settings)
    output, _ = process.communicate()
    return process.returncode, output


def write_plan(folder: Path, *phases: tuple[int, list[str]]) -> None:
    """Write a plan from phases: seconds, and Python's text of each item's arguments."""
    lines = ["from gpu_items import Item, Phase", "SIZES = {}", "TOY_SIZES = {}", "PLAN = ["]
    for seconds, items in phases:
        members = ", ".join(f"Item({item})" for item in items)
        lines.append(f"    Phase({seconds}, [{members}]),")
    (folder / "plan.py").write_text("\n".join([*lines, "]", ""]))


def has_ended(pid_file: Path) -> bool:
    status = Path(f"/proc/{int(pid_file.read_text())}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


def results(folder: Path, output: str = "output") -> dict[str, str]:
    """Return the result of each item."""
    lines = (folder / output / "gpu.jsonl").read_text().splitlines()
    return {record["item"]: record["result"] for record in map(json.loads, lines)}
