"""The groups of a plan are fetched and encoded in worker processes. No finished step is repeated.

Groups overlap: while one is encoded, the tasks of the next wait for free workers and the files of a third are fetched.
"""

from collections import deque
from concurrent.futures import Future
from typing import Any, NamedTuple

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

GROUPS_AHEAD = 1
"""Groups that are fetched, and groups that wait for workers, while one is encoded."""


class _Group(NamedTuple):
    """A group whose files are on this machine."""

    number: int
    tasks: list[Task]
    source_sha256: dict[str, str]


class Runner:
    """Fetches and encodes the groups of one shard.

    Args:
        workers: processes that encode.
        shard, shards: this process does the groups with number ≡ shard modulo shards.
    """

    def __init__(self, job: Job, plan: Plan, recipe: Recipe, workers: int, shard: int, shards: int) -> None:
        self.job, self.plan, self.recipe, self.workers = job, plan, recipe, workers
        self.mine = range(shard, len(plan.groups), shards)
        self.waiting = [group for group in self.mine if not job.workspace.group_record(group).is_file()]

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
        fetching: deque[Future[_Group]] = deque()
        encoding: deque[tuple[_Group, list[tuple[Task, Future[Any]]]]] = deque()
        for number in self.waiting:
            fetching.append(in_thread(self._fetch, number))
            if len(fetching) > GROUPS_AHEAD:
                encoding.append(self._begin(fetching.popleft().result()))
            if len(encoding) > GROUPS_AHEAD:
                self._finish(*encoding.popleft())
        encoding.extend(self._begin(future.result()) for future in fetching)
        for group, pending in encoding:
            self._finish(group, pending)

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

    def _begin(self, group: _Group) -> tuple[_Group, list[tuple[Task, Future[Any]]]]:
        """Hand the group's unfinished tasks to the workers."""
        begun_with = self.job.workspace.source_hashes(group.number)
        if not begun_with.is_file():  # written here: the thread may outlive this preparation and its lock
            write_json(begun_with, group.source_sha256)
        pending = []
        for task in group.tasks:
            if self.job.workspace.task_record(group.number, task.number).is_file():
                self.progress.add(task.size, tokens=0)
            else:
                pending.append((task, self.pool.submit(encode_task, self.job, task)))
        return group, pending

    def _finish(self, group: _Group, pending: list[tuple[Task, Future[Any]]]) -> None:
        """Wait for the group's tasks and write its record; remove their records and its fetched files."""
        for task, future in pending:
            self.progress.add(task.size, sum(stream["tokens"] for stream in future.result()["streams"].values()))
        write_group(self.job.workspace, group.number, len(group.tasks), group.source_sha256)
        self.job.workspace.remove_task_files(group.number)
        for file in (self.plan.files[index] for index in self.plan.groups[group.number]):
            self.recipe.source.release(file, self.job.workspace.source)


def all_groups_done(job: Job, plan: Plan) -> bool:
    """Whether all groups of all shards have their records."""
    return all(job.workspace.group_record(group).is_file() for group in range(len(plan.groups)))
