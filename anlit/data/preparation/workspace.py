"""The state of an unfinished preparation, DIR/.work/: every file in it is complete or absent.

.work/plan.json             settings and source files; written once
.work/tokenizer.json        the tokenizer all workers read
.work/tasks/G-sources.json  hashes of group G's source files, which must stay as they are until it is done
.work/tasks/G-T.json        task T of group G is encoded; its chunks are in their final place
.work/groups/G.json         all tasks of group G are; their records are gone
.work/source/               fetched files of the groups under way
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from anlit.data.storage.manifest import SPLITS, WORK
from anlit.errors import UserError
from anlit.reporting.files import TEMPORARY
from anlit.reporting.text import say

LOCK = ".prepare-"
MOST_GROUPS_LOST = 3
"""Finished groups that may be given up if the first group has failed: those that ran at the same time."""


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
        self._own: str | None = None
        """The part of the work whose lock this process has."""

    def make(self) -> None:
        for folder in (self.tasks, self.groups, self.source):
            folder.mkdir(parents=True, exist_ok=True)

    def source_hashes(self, group: int) -> Path:
        return self.tasks / f"{group:06d}-sources.json"

    def task_record(self, group: int, task: int) -> Path:
        return self.tasks / f"{group:06d}-{task:05d}.json"

    def group_record(self, group: int) -> Path:
        return self.groups / f"{group:06d}.json"

    def remove_task_files(self, group: int) -> None:
        for path in self.tasks.glob(f"{group:06d}-*"):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove everything that a finished folder does not have, temporary files of killed processes too."""
        for path in self.target.rglob(f"*{TEMPORARY}*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.root, ignore_errors=True)

    def forget_plan(self) -> None:
        """Remove the plan and the records; what was fetched stays."""
        for path in (self.plan, self.tokenizer):
            path.unlink(missing_ok=True)
        for folder in (self.tasks, self.groups):
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # there are files left
            self.source.rmdir()
            self.root.rmdir()

    def may_be_forgotten(self) -> bool:
        """Whether an unfinished preparation has failed in its first groups, and no other process works on it."""
        if list(self._others()):
            return False
        done = [read_json(path) for path in self.groups.glob("*.json")]
        if not self.group_record(0).is_file():
            return len(done) < MOST_GROUPS_LOST
        return not any(stream["tokens"] for group in done for stream in group["streams"].values())

    def start_over(self) -> None:
        """Remove all that an unfinished preparation has made; what was fetched stays."""
        assert self.root.is_dir(), self.root  # so the folder is ours
        self.forget_plan()
        for split in SPLITS:
            shutil.rmtree(self.target / split, ignore_errors=True)

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

    @contextmanager
    def shard_lock(self, shard: int, shards: int) -> Iterator[None]:
        """Keep a second process away from this part of the work, and processes that use another number of shards.

        Raises:
            UserError: a process with another number of shards is at work.
        """
        self._own = f"{shard}-of-{shards}"
        with self.lock(self._own):
            for other in self._others():  # two that begin at once may both refuse, but never both continue
                if not other.endswith(f"-of-{shards}"):
                    raise UserError(
                        f"Another process is preparing {self.target} as part {other.replace('-of-', ' of ')}, and this "
                        f"one is part {shard} of {shards}: wait for it, or divide the work alike with --shard."
                    )
            yield

    def _others(self) -> Iterator[str]:
        """Parts of the work ("0-of-2") that other processes are doing."""
        for path in sorted(self.target.glob(f"{LOCK}*-of-*.lock")):
            part = path.name.removeprefix(LOCK).removesuffix(".lock")
            if part == self._own:
                continue
            lock = FileLock(path)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                yield part
            else:
                lock.release()


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
