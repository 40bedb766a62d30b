"""A full disk, a killed worker, Ctrl-C: one sentence, and the same command goes on from there."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anlit.data.preparation import runner as run_module
from anlit.data.preparation.catalogue import CORPORA
from anlit.data.preparation.encode import Job, encode_task
from anlit.data.preparation.plan import Task
from anlit.data.preparation.recipe import Recipe
from anlit.data.preparation.sources import LocalFiles, SourceFile
from anlit.errors import UserError
from tests.data.preparing import (
    finish,
    hashes,
    make,
    members,
    start,
    start_command,
    wait_for,
)


def failing(number: int, error: Callable[[], BaseException]) -> Callable[[int], None]:
    """An os.fsync that fails at call `number` and later, as a disk does that is full."""
    calls = iter(range(1, 1_000_000))

    def fsync(descriptor: int) -> None:
        if next(calls) >= number:
            raise error()

    return fsync


@pytest.mark.parametrize(("workers", "code"), [(1, errno.ENOSPC), (2, errno.EDQUOT)])
def test_a_full_disk(
    recipe: Recipe, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, code: int
) -> None:
    for number in (1, 2, 4, 6):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing(number, lambda: OSError(code, os.strerror(code))))
            with pytest.raises(UserError, match=r"The disk of .*out is full: free some space; what is done .* is kept"):
                make(tmp_path / "out", recipe, workers)
        assert not list((tmp_path / "out").rglob("*.tmp-*"))
    make(tmp_path / "out", recipe, workers)
    assert hashes(tmp_path / "out") == hashes(finished)


def encode_or_be_killed(job: Job, task: Task) -> dict[str, Any]:
    if (task.group, task.number) == (1, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    return encode_task(job, task)


def test_a_worker_that_is_killed(
    recipe: Recipe, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        with pytest.raises(UserError) as caught:
            make(tmp_path / "out", recipe, workers=2)
        print(caught.value)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "encode_task", encode_or_be_killed)
        process = start(work, tmp_path / "output")
        assert finish(process) == 0
    printed = (tmp_path / "output").read_text()
    assert "A worker process was killed, perhaps for want of memory: what is done so far is kept" in printed
    wait_for(lambda: members(process.pid or 0) == [])
    make(tmp_path / "out", recipe, workers=2)
    assert hashes(tmp_path / "out") == hashes(finished)


def test_nothing_is_written_after_the_end(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the threads that fetch the next groups, which nobody waits for: the lock is free for another process."""
    ended, before = threading.Event(), threading.enumerate()

    def provide(self: LocalFiles, file: SourceFile, folder: Path) -> Path:
        if threading.current_thread() is not threading.main_thread() and "00000" not in file.name:
            ended.wait(20)
        return self.root / file.name

    def fail(job: Job, task: Task) -> None:
        raise KeyboardInterrupt

    make(tmp_path / "out", recipe, shard=1, shards=2)
    monkeypatch.setattr(LocalFiles, "provide", provide)
    monkeypatch.setattr(run_module, "encode_task", fail)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "out", recipe, shard=0, shards=2)
    left = hashes(tmp_path / "out")
    ended.set()
    for thread in set(threading.enumerate()) - set(before):
        thread.join(20)
    assert hashes(tmp_path / "out") == left


def encode_slowly(job: Job, task: Task) -> dict[str, Any]:
    """Also tells that it has come so far."""
    if task.group == 1:
        (job.workspace.target.parent / "reached").touch()
        time.sleep(0.5)
    return encode_task(job, task)


def test_control_c(recipe: Recipe, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends SIGINT to the command and to its workers alike."""
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "encode_task", encode_slowly)
        patch.setitem(CORPORA, "OpenWebText", lambda options: recipe)
        arguments = ["prepare", "OpenWebText", "--output", str(tmp_path / "out"), "--workers", "2"]
        process = start_command(arguments, tmp_path / "output")
        wait_for((tmp_path / "reached").exists)
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGINT)
        assert finish(process) == 1
    printed = (tmp_path / "output").read_text()
    assert printed.endswith("Interrupted: what is done so far is kept, repeat the command to go on.\n")
    assert "Traceback" not in printed
    wait_for(lambda: members(process.pid or 0) == [])
    work = tmp_path / "out" / ".work"
    assert (work / "plan.json").is_file()
    assert [*work.glob("tasks/000001-[0-9]*.json"), *work.glob("groups/000001.json")]  # what was begun came to its end
    make(tmp_path / "out", recipe)
    assert hashes(tmp_path / "out") == hashes(finished)
