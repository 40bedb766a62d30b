"""The groups of a plan are fetched and encoded in worker processes. No finished step is repeated.

Groups overlap: while one is encoded, the files of the next are fetched.
"""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from anlit.data.preparation.encode import Job, encode_task
from anlit.data.preparation.plan import FoundFile, Plan, Task, tasks_of
from anlit.data.preparation.progress import Progress
from anlit.data.preparation.publish import write_group
from anlit.data.preparation.recipe import Recipe
from anlit.data.preparation.sources import file_sha256, state_of
from anlit.data.preparation.workers import in_thread, worker_pool
from anlit.data.preparation.workspace import read_json
from anlit.errors import UserError
from anlit.reporting.files import write_json

GROUPS_AT_ONCE = 3


@dataclass
class _Group:
    """A group under way."""

    number: int
    tasks: list[Task]
    source_sha256: dict[str, str]
    unfinished: set[int] = field(default_factory=set)


class Runner:
    """Fetches and encodes the groups of one shard.

    Args:
        job: what the workers are told.
        plan: the groups.
        recipe: the sizes of tasks and chunks.
        workers: processes that encode.
        shard, shards: this process does the groups with number ≡ shard modulo shards.
    """

    def __init__(self, job: Job, plan: Plan, recipe: Recipe, workers: int, shard: int, shards: int) -> None:
        self.job, self.plan, self.recipe, self.workers = job, plan, recipe, workers
        self.mine = range(shard, len(plan.groups), shards)
        self.waiting = [group for group in self.mine if not job.workspace.group_record(group).is_file()]
        self.under_way: set[int] = set()
        self.pending: dict[Future[Any], Callable[[Any], None]] = {}

    def run(self) -> None:
        """Do all that is left.

        Raises:
            UserError: a source file or a document cannot be used.
            OSError: a file cannot be read or written.
        """
        size = sum(self.plan.group_size(group) for group in self.mine)
        done = size - sum(self.plan.group_size(group) for group in self.waiting)
        workers = min(self.workers, (size - done) // self.recipe.task_bytes)
        with worker_pool(workers) as self.pool, Progress(self.plan.settings["corpus"], size, done) as self.progress:
            try:
                self._loop()
            except BaseException:
                self.pool.shutdown(wait=True, cancel_futures=True)  # tasks that have begun are finished and kept
                raise

    def _loop(self) -> None:
        while self.waiting or self.pending:
            while self.waiting and len(self.under_way) < GROUPS_AT_ONCE:
                number = self.waiting.pop(0)
                self.under_way.add(number)
                self.pending[in_thread(self._fetch, number)] = self._encode
            finished, _ = wait(self.pending, return_when=FIRST_COMPLETED)
            for future in finished:
                self.pending.pop(future)(future.result())

    def _fetch(self, number: int) -> _Group:
        """Runs in a thread: the group's files on this machine, their hashes, and its tasks."""
        found: dict[str, FoundFile] = {}
        sha256: dict[str, str] = {}
        for file in (self.plan.files[index] for index in self.plan.groups[number]):
            path = self.recipe.source.provide(file, self.job.workspace.source)
            found[file.name] = FoundFile(path, state_of(path))  # its state before its hash, and again when it is read
            trusted = file.sha256 if self.recipe.source.checks_hashes else None
            sha256[file.name] = trusted or file_sha256(path)
        self._refuse_changes(number, found, sha256)
        return _Group(number, tasks_of(self.plan, self.recipe, number, found), sha256)

    def _refuse_changes(self, number: int, found: dict[str, FoundFile], sha256: dict[str, str]) -> None:
        """A group is made of the files that it was begun with: some of its tasks may be done."""
        begun_with = self.job.workspace.source_hashes(number)
        then = read_json(begun_with) if begun_with.is_file() else dict(sha256)
        planned = (self.plan.files[index] for index in self.plan.groups[number])
        then |= {file.name: file.sha256 for file in planned if file.sha256 is not None}
        changed = [name for name in sorted({*then, *sha256}) if then.get(name) != sha256.get(name)]
        if changed:
            name = found[changed[0]].path if changed[0] in found else changed[0]
            raise UserError(
                f"{name} is not what {self.job.workspace.target} was begun with: put the "
                "old file back, or remove that folder and repeat the command."
            )

    def _encode(self, group: _Group) -> None:
        begun_with = self.job.workspace.source_hashes(group.number)
        if not begun_with.is_file():  # written here: the thread may outlive this preparation and its lock
            write_json(begun_with, group.source_sha256)
        for task in group.tasks:
            record = self.job.workspace.task_record(group.number, task.number)
            if record.is_file():
                self.progress.add(task.size, tokens=0)
            else:
                group.unfinished.add(task.number)
        for task in (task for task in group.tasks if task.number in group.unfinished):
            self.pending[self.pool.submit(encode_task, self.job, task)] = self._after_task(group, task)
        if not group.unfinished:
            self._finish(group)

    def _after_task(self, group: _Group, task: Task) -> Callable[[dict[str, Any]], None]:
        def then(record: dict[str, Any]) -> None:
            self.progress.add(task.size, sum(stream["tokens"] for stream in record["streams"].values()))
            group.unfinished.remove(task.number)
            if not group.unfinished:
                self._finish(group)

        return then

    def _finish(self, group: _Group) -> None:
        """Write the record of a group whose chunks are in place; remove its tasks' records and its fetched files."""
        write_group(self.job.workspace, group.number, len(group.tasks), group.source_sha256)
        self.under_way.remove(group.number)
        self.job.workspace.remove_task_files(group.number)
        for file in (self.plan.files[index] for index in self.plan.groups[group.number]):
            self.recipe.source.release(file, self.job.workspace.source)


def all_groups_done(job: Job, plan: Plan) -> bool:
    """Whether every shard has come to its end."""
    return all(job.workspace.group_record(group).is_file() for group in range(len(plan.groups)))
