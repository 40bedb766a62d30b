"""Workers, a cluster, kills, a full disk: the same command goes on, and makes the same files."""

import ctypes
import errno
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from anlit.cli import main
from anlit.data.preparation import executors
from anlit.data.preparation.encode import encode_task
from anlit.data.preparation.recipes import RECIPES, Recipe
from anlit.data.preparation.tasks import Job, Task
from anlit.errors import RunError, UserError
from tests.data import layouts
from tests.data.layouts import short_documents
from tests.data.preparing import SIZES, SMALL, assert_makes, make, recipe_of, record_times
from tests.data.processes import PATIENCE_S, finish, free_port, members, start, wait_for
from tests.data.reader import assert_holds, by_split, hashes

KILLED = 9
"""Exit code of a process that a test ends."""
STEPS = ("replace", "fsync", "unlink", "mkdir", "rmdir")
"""Functions of `os` that change the file system for others to see.

Writing into a file that has no lasting name yet is not among them.
"""


def test_processes_at_once_wait_for_each_other(recipe: Recipe, finished: Path, out: Path) -> None:
    out.mkdir()
    printed = out.with_name("printed")
    message = f"Another process is preparing {out}: waiting for it."

    with FileLock(out / ".prepare.lock"):
        first = start(lambda: make(out, recipe, 2), printed)
        second = start(lambda: make(out, recipe, 2), printed)
        wait_for(lambda: printed.exists() and printed.read_text().count(message) == 2)

    assert finish(first) == 0
    assert finish(second) == 0
    assert printed.read_text().count("Preparing OpenWebText") == 1  # the other finds it finished
    assert hashes(out) == hashes(finished)


KILLER = """
import os, signal, time
from pathlib import Path
from anlit.data.preparation import executors
encode = executors.__dict__.setdefault("whole", executors.encode_task)  # Dask loads this file twice
def encode_or_be_killed(job, task):
    killed = Path(job.folder).parent / "killed"
    if task.number == 0 and not killed.exists():
        killed.touch()
        (job.folder / "train").mkdir(parents=True, exist_ok=True)
        (job.folder / "train" / "chunk-000000-000.bin").write_bytes(b"begun")
        time.sleep(1)  # until Dask has seen that the worker has begun
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(job, task)
executors.encode_task = encode_or_be_killed
"""
"""Kills the worker that has the first task, once, in the middle of it."""


@contextmanager
def dask(log: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """Run a scheduler or a worker of Dask in the folder of its log. The scheduler listens."""
    command = [sys.executable, "-m", "dask", *arguments, "--no-dashboard"]
    # A slow machine needs more than 30 s to start a worker's process.
    patience = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": f"{PATIENCE_S} s"}
    with (
        log.open("a") as file,
        subprocess.Popen(
            command, stdout=file, stderr=file, cwd=log.parent, env=os.environ | patience
        ) as process,
    ):
        wait_for(lambda: "Scheduler at" in log.read_text())
        yield process
        process.terminate()


def test_a_cluster_makes_the_same_folder_though_a_worker_is_killed(
    recipe: Recipe, finished: Path, source: Path, tmp_path: Path, out: Path, monkeypatch, capsys
) -> None:
    pytest.importorskip("distributed")
    (tmp_path / "killer.py").write_text(KILLER)
    log = tmp_path / "log"
    port = str(free_port())
    cluster = f"tcp://127.0.0.1:{port}"
    worker = ("worker", cluster, "--nthreads", "1", "--preload", "killer.py")
    with (
        dask(log, "scheduler", "--host", "127.0.0.1", "--port", port),
        dask(log, *worker),
        dask(log, *worker),
    ):
        assert_makes(out, recipe, finished, cluster=cluster)

        assert (tmp_path / "killed").exists()

        # An error of a worker reaches the user.
        (file,) = layouts.openwebtext(source, ["a", "b"], n_files=1)
        file.write_bytes(b"PAR1")
        monkeypatch.chdir(tmp_path)
        command = ["prepare", "OpenWebText", "--source", "source", "--tokenizer", "bpe"]
        assert main([*command, "--cluster", cluster]) == 2

    message = capsys.readouterr().err.splitlines()[-1]
    location = "source/plain_text/train-00000-of-00080.parquet, the file"
    assert f"{location}: it has no readable parquet footer" in message


def test_a_cluster_that_is_not_there(recipe: Recipe, out: Path, monkeypatch) -> None:
    """Nothing listens, the address is wrong, or a port accepts and never answers."""
    pytest.importorskip("distributed")
    monkeypatch.setattr(executors, "SCHEDULER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for address in (f"tcp://127.0.0.1:{free_port()}", "nowhere", f"tcp://127.0.0.1:{port}"):
            message = f"No Dask scheduler answers at --cluster {address}: start one"
            with pytest.raises(UserError, match=message):
                make(out, recipe, cluster=address)


def test_a_cluster_with_tls_needs_certificates(recipe: Recipe, out: Path) -> None:
    pytest.importorskip("distributed")

    with pytest.raises(UserError, match=r"at --cluster tls:.* tls:// needs certificates"):
        make(out, recipe, cluster="tls://127.0.0.1:1")


@pytest.mark.parametrize("are_submitted", [False, True])
def test_a_dask_scheduler_that_is_killed(
    recipe: Recipe, finished: Path, out: Path, tmp_path: Path, monkeypatch, are_submitted: bool
) -> None:
    """Before or after it has the tasks. It is alone, so no task is done before it is gone."""
    distributed = pytest.importorskip("distributed")
    log = tmp_path / "log"
    port = str(free_port())
    with dask(log, "scheduler", "--host", "127.0.0.1", "--port", port) as scheduler:
        owner, name = distributed.Client, "get_executor"
        if are_submitted:
            owner, name = executors, "as_completed"
        original = getattr(owner, name)

        def kill_and_go_on(*arguments: Any, **settings: Any) -> Any:
            scheduler.kill()
            scheduler.wait()
            return original(*arguments, **settings)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, kill_and_go_on)
            with pytest.raises(UserError, match=r"scheduler at --cluster .* is gone: start it"):
                make(out, recipe, cluster=f"tcp://127.0.0.1:{port}")

    assert_makes(out, recipe, finished)


@pytest.mark.parametrize("task_bytes", [1000, 1 << 30])
def test_tokens_do_not_depend_on_the_size_of_tasks(
    tokenizer: str, source: Path, out: Path, task_bytes: int
) -> None:
    texts = short_documents(70, seed=9)
    pattern = layouts.json_files(source, texts)
    options = {"text_field": "content", "pattern": pattern, "val_fraction": 0.2}
    sizes = SMALL | {"task_bytes": task_bytes}

    make(out, recipe_of("TextFiles", source, sizes, tokenizer=tokenizer, **options))

    assert task_bytes > 1000 or len(record_times(out)) > 20
    assert_holds(out, by_split(texts, 0.2))


def count_steps(name: str, numbers: Iterator[int], before_step: Callable[[int], object]) -> None:
    """Make a function of `os` call `before_step` with the number of the step first."""
    step = getattr(os, name)

    def counted_step(*args: Any, **kwargs: Any) -> Any:
        before_step(next(numbers))
        return step(*args, **kwargs)

    setattr(os, name, counted_step)


def exit_code_of_preparation(
    before_step: Callable[[int], object], folder: Path, recipe: Recipe
) -> int | None:
    """Prepare a folder in a process, which calls `before_step` before each of its `STEPS`."""

    def count_and_make() -> None:
        numbers = itertools.count(1)
        for name in STEPS:
            count_steps(name, numbers, before_step)
        make(folder, recipe)

    return finish(start(count_and_make))


@pytest.mark.parametrize(
    ("n_ends", "stride"), [(6, 16), pytest.param(12, 4, marks=pytest.mark.slow)]
)
def test_killed_before_any_step(
    n_ends: int, stride: int, session_folder: Path, tmp_path: Path
) -> None:
    """Before the first and the last steps, and some between; a tokenizer is trained too."""
    texts = short_documents(40, seed=1)
    layouts.openwebtext(session_folder / "killed", texts, n_files=4, row_group_size=4)
    options = {"tokenizer": "bpe", "vocab_size": 280, "val_fraction": 0.2}
    recipe = recipe_of("OpenWebText", session_folder / "killed", SIZES, **options)
    count = tmp_path / "steps"
    undisturbed = tmp_path / "undisturbed"

    def write_number(number: int) -> None:
        count.write_text(str(number))

    assert exit_code_of_preparation(write_number, undisturbed, recipe) == 0
    assert len(record_times(undisturbed)) > 4
    n_steps = int(count.read_text())
    first_steps = range(1, n_ends)
    middle_steps = range(n_ends, n_steps - n_ends, stride)
    last_steps = range(n_steps - n_ends, n_steps + 1)
    for last_step in (*first_steps, *middle_steps, *last_steps):
        folder = tmp_path / str(last_step)

        def end_process(number: int, last_step: int = last_step) -> None:
            if number == last_step:
                os._exit(KILLED)

        assert exit_code_of_preparation(end_process, folder, recipe) == KILLED

        assert_makes(folder, recipe, undisturbed)
        shutil.rmtree(folder)


def test_killed_at_random_moments_with_two_workers(
    tokenizer: str, source: Path, tmp_path: Path, monkeypatch
) -> None:
    """Only the command itself is killed; its workers end without a signal to them."""
    texts = short_documents(290, seed=2)
    layouts.openwebtext(source, texts, n_files=6, row_group_size=10)
    recipe = recipe_of("OpenWebText", source, tokenizer=tokenizer, val_fraction=0.2)
    rng = random.Random(0)
    undisturbed = tmp_path / "undisturbed"
    start_time = time.monotonic()
    process = start(lambda: make(undisturbed, recipe, workers=2))
    assert finish(process) == 0
    duration = time.monotonic() - start_time
    begun = tmp_path / "begun"
    load_library = ctypes.CDLL

    def load_late(name: str | None) -> ctypes.CDLL:
        parent = multiprocessing.parent_process()
        assert parent is not None
        begun.touch()
        wait_for(lambda: os.getppid() != parent.pid)
        return load_library(name)

    # The first time, the command ends before the workers ask to end with it.
    monkeypatch.setattr(ctypes, "CDLL", load_late)
    for number in range(3):
        folder = tmp_path / str(number)
        process = start(lambda folder=folder: make(folder, recipe, workers=2))
        if number == 0:
            wait_for(begun.exists)
            monkeypatch.undo()
        else:
            time.sleep(rng.uniform(0.1, 0.9) * duration)
        process.kill()
        process.join()

        wait_for(lambda process=process: members(process.pid) == [])
        assert_makes(folder, recipe, undisturbed, workers=2)


@pytest.mark.parametrize(("workers", "code"), [(1, errno.ENOSPC), (2, errno.EDQUOT)])
def test_a_full_disk(
    recipe: Recipe, finished: Path, out: Path, monkeypatch, workers: int, code: int
) -> None:
    """The disk is full at a file of a process, each time at a later file; then it has room."""
    for n_files in (1, 2, 4, 6):
        numbers = itertools.count(1)

        def fsync(descriptor: int, n_files: int = n_files, numbers: Any = numbers) -> None:
            if next(numbers) >= n_files:  # files that the process has written so far
                raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            message = r"The disk of .*out is full: free some space; what is done .* is kept"
            with pytest.raises(RunError, match=message) as raised:
                make(out, recipe, workers)
            assert raised.value.exit_code == 1
        assert not list(out.rglob("*.tmp-*"))

    assert_makes(out, recipe, finished, workers=workers)


def before_task_3(action: Callable[[Job], object]) -> Callable[[Job, Task], int]:
    """Return `encode_task` with an action before task 3."""

    def act_and_encode(job: Job, task: Task) -> int:
        if task.number == 3:
            action(job)
        return encode_task(job, task)

    return act_and_encode


def test_a_worker_that_is_killed(recipe: Recipe, finished: Path, out: Path, monkeypatch) -> None:
    kill_worker = before_task_3(lambda job: os.kill(os.getpid(), signal.SIGKILL))
    monkeypatch.setattr(executors, "encode_task", kill_worker)

    message = "A worker process was killed, perhaps for want of memory: what is done so far"
    with pytest.raises(RunError, match=message):
        make(out, recipe, workers=2)

    monkeypatch.undo()
    assert_makes(out, recipe, finished, workers=2)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("multiprocessing.synchronize._multiprocessing.SemLock", errno.ENOSPC),
        ("multiprocessing.synchronize._multiprocessing.SemLock", errno.ENOENT),
        ("os.fork", errno.EAGAIN),
    ],
    ids=["a full /dev/shm", "no /dev/shm", "no process"],
)
def test_workers_that_cannot_be_started(
    recipe: Recipe, finished: Path, out: Path, monkeypatch, call: str, code: int
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        message = rf"2 processes of --workers cannot be started \({os.strerror(code)}\): free mem"
        with pytest.raises(RunError, match=message):
            make(out, recipe, workers=2)

    assert_makes(out, recipe, finished, workers=2)


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    ("number", "workers", "code"),
    [
        (signal.SIGINT, 1, 1),
        (signal.SIGINT, 2, 1),
        (signal.SIGTERM, 1, 75),
        (signal.SIGTERM, 2, 75),
        (signal.SIGHUP, 2, 75),
    ],
)
@pytest.mark.parametrize("are_slow", [False, True], ids=["", "slow workers"])
def test_a_signal_to_the_group(
    recipe: Recipe,
    finished: Path,
    out: Path,
    monkeypatch,
    number: int,
    workers: int,
    code: int,
    are_slow: bool,
) -> None:
    """A terminal or scancel sends it to the command and to its workers alike; none works on.

    A slow worker, here a stopped process, has not seen that signal yet when the command ends it.
    """
    reached = out.with_name("reached")
    printed = out.with_name("printed")

    def wait_without_end(job: Job) -> None:
        reached.touch()
        time.sleep(600)

    monkeypatch.setattr(executors, "encode_task", before_task_3(wait_without_end))
    monkeypatch.setitem(RECIPES, "OpenWebText", recipe)
    command = ["prepare", "OpenWebText", "--output", str(out), "--workers", str(workers)]
    process = start(lambda: sys.exit(main(command)), printed)
    monkeypatch.undo()
    wait_for(reached.exists)
    if are_slow:
        for worker in {*members(process.pid)} - {process.pid}:
            os.kill(worker, signal.SIGSTOP)

    os.killpg(process.pid or 0, number)

    assert finish(process) == code
    message = "Interrupted: what is done so far is kept, repeat the command to go on.\n"
    assert printed.read_text().endswith(message)
    assert "Traceback" not in printed.read_text()
    wait_for(lambda: members(process.pid) == [])
    assert_makes(out, recipe, finished)
