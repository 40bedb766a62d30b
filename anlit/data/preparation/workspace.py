"""The state of an unfinished preparation: DIR/.work/, made of files that are there whole or not at all.

.work/plan.json             settings, source files and held-out records; written once
.work/tokenizer.json        the tokenizer all workers read
.work/tasks/G-sources.json  hashes of group G's source files, which must stay as they are until it is done
.work/tasks/G-T.json        task T of group G is encoded; its tokens are in G-T.<stream>
.work/groups/G.json         group G's chunks are in their final place; its tasks are gone
.work/source/               fetched files of the groups under way
"""

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from anlit.reporting.files import TEMPORARY

WORK = ".work"
LOCK = ".prepare-"


class Workspace:
    """Paths and atomic files of one preparation.

    Args:
        target: the prepared folder to be.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.root = target / WORK
        self.tasks, self.groups, self.source = self.root / "tasks", self.root / "groups", self.root / "source"
        self.plan, self.tokenizer = self.root / "plan.json", self.root / "tokenizer.json"

    def make(self) -> None:
        for folder in (self.tasks, self.groups, self.source):
            folder.mkdir(parents=True, exist_ok=True)

    def source_hashes(self, group: int) -> Path:
        return self.tasks / f"{group:06d}-sources.json"

    def task_record(self, group: int, task: int) -> Path:
        return self.tasks / f"{group:06d}-{task:05d}.json"

    def task_tokens(self, group: int, task: int, stream: str) -> Path:
        """The tokens that a task gave for one stream (a split, or a split and its subset)."""
        return self.tasks / f"{group:06d}-{task:05d}.{stream.replace('/', '.')}"

    def group_record(self, group: int) -> Path:
        return self.groups / f"{group:06d}.json"

    def remove_task_files(self, group: int) -> None:
        for path in self.tasks.glob(f"{group:06d}-*"):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove everything that a finished folder does not have, also what killed processes left in its midst."""
        for path in self.target.rglob(f"*{TEMPORARY}*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.root, ignore_errors=True)

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Keep a second process away from the same work; waits for it and says so.

        The lock is the operating system's and ends with its process, however that ends. Its empty file stays.
        """
        self.target.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.target / f"{LOCK}{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"Another process is preparing {self.target}: waiting for it.")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def say(text: str) -> None:
    """One line on the terminal's error stream, with the time: preparing can take days."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)
