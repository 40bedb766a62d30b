"""The results of `make gpu`: the statuses of its items, and their page, records and archive."""

import csv
import importlib.metadata
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_items import Item, Phase

ROOT = Path(__file__).resolve().parents[1]
LARGEST_FILE = 2_000_000
"""Bytes of the largest file in gpu.tar.gz."""
LAST_LINES = 30
"""Lines of the log that stand for an item without a page."""
METRICS = ("train/tokens_per_second", "train/mfu", "train/data_wait_share", "val/loss")


class Results:
    """The items' folders and statuses in `state`, and their page and records in `output`.

    Every file is replaced by a rename, so that a killed call leaves no damaged file.
    """

    def __init__(self, state: Path, output: Path, phases: list[Phase]) -> None:
        self.state = state
        self.output = output
        self.phases = phases
        self.items: list[Item] = []
        for phase in phases:
            self.items += phase.items
        self.machine = describe_machine()

    def folder(self, name: str) -> Path:
        return self.state / name

    def status(self, name: str) -> dict[str, Any]:
        """Return the item's result, exit code and seconds; {} if it has not ended."""
        path = self.state / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def result(self, name: str) -> str:
        return self.status(name).get("result", "waiting")

    def can_run_again(self, item: Item) -> bool:
        """Return whether the next call runs the item: it waits, or something was missing."""
        return self.result(item.name).startswith(("waiting", "left out", "no device"))

    def is_unfinished(self, item: Item) -> bool:
        """Return whether the item has failed, or had too little time."""
        bad_results = ("failed", "over its time", "no time was left")
        return self.result(item.name).startswith(bad_results)

    def forget(self, name: str) -> None:
        """Let the item run again."""
        (self.state / f"{name}.json").unlink(missing_ok=True)

    def end(self, item: Item, result: str, seconds: int = 0, code: int | None = None) -> None:
        """Record the item's result, and write all files again."""
        status = {
            "item": item.name,
            "finds": item.finds,
            "result": result,
            "exit_code": code,
            "seconds": seconds,
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        write_whole(self.state / f"{item.name}.json", json.dumps(status))
        self.write()

    def write(self) -> None:
        """Write gpu.md, gpu.jsonl, pictures and gpu.tar.gz."""
        self.output.mkdir(parents=True, exist_ok=True)
        lines = []
        temporary = self.output / ".gpu.tar.gz.new"
        with tarfile.open(temporary, "w:gz") as archive:
            for item in self.items:
                status = self.status(item.name)
                if status:
                    lines.append(json.dumps(status | {"record": self.record(item.name)}) + "\n")
                if status.get("exit_code") is not None:
                    archive.add(self.folder(item.name), item.name, filter=without_large_files)
                    for picture in self.folder(item.name).glob("*.png"):
                        shutil.copy(picture, self.output)
        temporary.replace(self.output / "gpu.tar.gz")
        write_whole(self.output / "gpu.jsonl", "".join(lines))
        write_whole(self.output / "gpu.md", self.page())

    def record(self, name: str) -> Any:
        """Return the item's own record, else the metrics of its run, {} without a run."""
        for path in self.folder(name).glob("*.json"):
            return json.loads(path.read_text())
        return read_metrics(self.folder(name) / "run" / "metrics.csv")

    def page(self) -> str:
        lines = ["# Measured by `make gpu`", "", self.machine, ""]
        lines += ["| item | result | s | of | what it finds out |", "|---|---|---:|---:|---|"]
        for phase in self.phases:
            for item in phase.items:
                seconds = self.status(item.name).get("seconds", "")
                cells = (item.name, self.result(item.name), seconds, phase.seconds, item.finds)
                lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
        for item in self.items:
            if self.status(item.name).get("exit_code") is not None:
                lines += ["", f"## {item.name}: {item.finds}", "", *self.section(item.name)]
        return "\n".join([*lines, ""])

    def section(self, name: str) -> list[str]:
        """Return the lines of the item's page, else of its run's metrics, else of its log's end.

        `benchmark fit` has a run and a record without a page: its log has the result.
        """
        folder = self.folder(name)
        for page in folder.glob("*.md"):
            _, _, text = page.read_text().partition("\n")
            return re.sub("^(?=##)", "#", text.strip(), flags=re.MULTILINE).splitlines()
        has_record = any(folder.glob("*.json"))
        metrics = read_metrics(folder / "run" / "metrics.csv")
        if metrics and not has_record and self.result(name) == "finished":
            values = " | ".join(f"{value:.4g}" for value in metrics.values())
            return [f"| {' | '.join(metrics)} |", "|---" * len(metrics) + "|", f"| {values} |"]
        log = (folder / "log").read_text(errors="replace").splitlines()
        return ["```", *log[-LAST_LINES:], "```"]


def write_whole(path: Path, text: str) -> None:
    """Replace the file's text by a rename."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text)
    temporary.replace(path)


def read_metrics(path: Path) -> dict[str, float]:
    """Return a run's last loss, and medians of its speeds in the second half of its log."""
    metrics: dict[str, float] = {}
    if not path.exists():
        return metrics
    with path.open() as file:
        rows = list(csv.DictReader(file))
    for name in METRICS:
        values = [float(row[name]) for row in rows if row.get(name)]
        if values and name == "val/loss":
            metrics[name] = values[-1]
        elif values:
            metrics[name] = statistics.median(values[len(values) // 2 :])
    return metrics


def without_large_files(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave checkpoints, shards and large files out of the archive."""
    is_left_out = member.name.endswith(("/checkpoints", "prepare/data"))
    return None if is_left_out or member.size > LARGEST_FILE else member


def query_gpu(fields: str) -> list[str]:
    """Return nvidia-smi's values of the first GPU in the order of `fields`; [] without a GPU."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [value.strip() for value in answer.splitlines()[0].split(",")]


def describe_machine() -> str:
    """Return the head of the page: GPU, driver and clocks, versions, commit and day."""
    gpu = query_gpu("name,driver_version,clocks.max.sm,clocks.sm,power.limit")
    device = "No GPU: toy sizes on a CPU"
    if gpu:
        device = "{}, driver {}, clock {} MHz at most, {} MHz at the start, {} W".format(*gpu)
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "triton", "lightning"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    day = datetime.now(UTC).date()
    return f"{device}; {', '.join(versions)}; commit {commit()}, {day}."


def commit() -> str:
    """Return the clone's commit, without git the value of ANLIT_COMMIT."""
    try:
        # A copy of the clone may lie inside another repository.
        run_git("ls-files", "--error-unmatch", "docker/gpu.py")
        return run_git("rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("ANLIT_COMMIT", "unknown")


def run_git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
