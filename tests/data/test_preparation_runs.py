"""Workers, a cluster, kills, interruptions, a full disk: the same command goes on, and makes the same files."""

import ctypes
import errno
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from filelock import FileLock

from anlit.cli import main
from anlit.data.preparation import executors
from anlit.data.preparation.encode import encode_task
from anlit.data.preparation.recipes import RECIPES, Recipe
from anlit.data.preparation.tasks import Job, Task
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import documents
from tests.data.preparing import SIZES, SMALL, assert_makes, make, recipe_of, written
from tests.data.processes import finish, free_port, members, start, wait_for
from tests.data.reader import assert_holds, by_split, hashes

KILLED = 9
STEPS = ("replace", "fsync", "unlink", "mkdir", "rmdir")
"""What changes the file system for others to see, apart from writing into files that have no lasting name yet."""


def test_processes_at_once_wait_for_each_other(recipe: Recipe, finished: Path, out: Path) -> None:
    out.mkdir()
    printed, waits = (
        out.with_name("printed"),
        f"Another process is preparing {out}: waiting for it.",
    )
    with FileLock(out / ".prepare.lock"):
        processes = [start(lambda: make(out, recipe, 2), printed) for _ in range(2)]
        wait_for(lambda: printed.exists() and printed.read_text().count(waits) == 2)
    assert [finish(process) for process in processes] == [0, 0]
    assert (
        printed.read_text().count("Preparing OpenWebText") == 1
    )  # the other one finds it finished
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


def test_a_cluster_makes_the_same_folder_though_a_worker_is_killed(
    recipe: Recipe, finished: Path, tmp_path: Path, out: Path, monkeypatch, capsys
) -> None:
    pytest.importorskip("distributed")
    (tmp_path / "killer.py").write_text(KILLER)
    port = str(free_port())
    cluster = f"tcp://127.0.0.1:{port}"
    worker = ["worker", cluster, "--nthreads", "1", "--preload", "killer.py"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": (tmp_path / "log").open("w"), "cwd": tmp_path}
    with ExitStack() as stack:
        for command in (["scheduler", "--host", "127.0.0.1", "--port", port], worker, worker):
            words = [sys.executable, "-m", "dask", *command, "--no-dashboard"]
            process = stack.enter_context(subprocess.Popen(words, env=os.environ, **quiet))
            stack.callback(process.terminate)
        assert_makes(out, recipe, finished, cluster=cluster)
        assert (tmp_path / "killed").exists()
        layouts.openwebtext(tmp_path / "hub", ["a", "b"], n_files=1)[0].write_bytes(b"PAR1")
        monkeypatch.chdir(tmp_path)
        assert (
            main(
                [
                    "prepare",
                    "OpenWebText",
                    "--source",
                    "hub",
                    "--tokenizer",
                    "bpe",
                    "--cluster",
                    cluster,
                ]
            )
            == 2
        )
    said = capsys.readouterr().err.splitlines()[-1]
    assert (
        "hub/plain_text/train-00000-of-00080.parquet, the file: it has no readable parquet footer"
        in said
    )


def test_a_cluster_that_is_not_there(recipe: Recipe, out: Path, monkeypatch) -> None:
    """Nothing listens, the address is none, or something listens that says nothing."""
    pytest.importorskip("distributed")
    monkeypatch.setattr(executors, "CONTACT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for address in (f"tcp://127.0.0.1:{free_port()}", "nowhere", f"tcp://127.0.0.1:{port}"):
            with pytest.raises(
                UserError, match=f"No Dask scheduler answers at --cluster {address}: start one"
            ):
                make(out, recipe, cluster=address)


def test_a_cluster_with_tls_needs_certificates(recipe: Recipe, out: Path) -> None:
    pytest.importorskip("distributed")
    with pytest.raises(UserError, match=r"--cluster tls:.* needs certificates: name"):
        make(out, recipe, cluster="tls://127.0.0.1:1")


def test_a_dask_scheduler_that_is_killed(
    recipe: Recipe, finished: Path, out: Path, tmp_path: Path
) -> None:
    """The scheduler is alone, so no task is done before it is gone."""
    pytest.importorskip("distributed")
    port = str(free_port())
    words = [sys.executable, "-m", "dask", "scheduler", "--host", "127.0.0.1", "--port", port]
    log = (tmp_path / "log").open("w")
    with subprocess.Popen([*words, "--no-dashboard"], stdout=log, stderr=log) as scheduler:
        wait_for(lambda: "Scheduler at" in (tmp_path / "log").read_text())
        threading.Timer(3, scheduler.kill).start()
        with pytest.raises(UserError, match=r"Dask scheduler at --cluster .* is gone: start it"):
            make(out, recipe, cluster=f"tcp://127.0.0.1:{port}")
    assert_makes(out, recipe, finished)


@pytest.mark.parametrize("task_bytes", [1000, 1 << 30])
def test_tokens_do_not_depend_on_the_size_of_tasks(
    tokenizer: str, tmp_path: Path, out: Path, task_bytes: int
) -> None:
    some = list(documents(80, seed=9))[10:]
    options = {
        "text_field": "content",
        "pattern": layouts.json_files(tmp_path / "text", some),
        "val_fraction": 0.2,
    }
    sizes = SMALL | {"task_bytes": task_bytes}
    make(out, recipe_of("TextFiles", tmp_path / "text", sizes, tokenizer=tokenizer, **options))
    assert len(written(out)) > 20 or task_bytes > 1000
    assert_holds(out, by_split(some, 0.2))


def killed_at(then: Callable[[int], object], folder: Path, recipe: Recipe) -> int | None:
    """The exit code of a process that prepares, and calls `then` with the number of each step before it takes it."""

    def work() -> None:
        numbers = itertools.count(1)
        for name in STEPS:
            step = getattr(os, name)
            setattr(
                os,
                name,
                lambda *args, step=step, **kwargs: (then(next(numbers)), step(*args, **kwargs))[1],
            )
        make(folder, recipe)

    return finish(start(work))


def test_killed_before_any_step(place: Path, tmp_path: Path) -> None:
    """Each of the first and the last steps, and every eighth of those between; a tokenizer is trained as well."""
    layouts.openwebtext(
        place / "killed", list(documents(50, seed=1))[10:], n_files=4, row_group_size=4
    )
    recipe = recipe_of(
        "OpenWebText", place / "killed", SIZES, tokenizer="bpe", vocab_size=280, val_fraction=0.2
    )
    count, undisturbed = tmp_path / "steps", tmp_path / "undisturbed"
    assert killed_at(lambda number: count.write_text(str(number)), undisturbed, recipe) == 0
    assert len(written(undisturbed)) > 4
    n_steps = int(count.read_text())
    for step in [*range(1, 12), *range(12, n_steps - 12, 8), *range(n_steps - 12, n_steps + 1)]:
        folder = tmp_path / str(step)
        assert (
            killed_at(lambda number, step=step: number == step and os._exit(KILLED), folder, recipe)
            == KILLED
        )
        assert_makes(folder, recipe, undisturbed)
        shutil.rmtree(folder)


def test_killed_at_random_moments_with_two_workers(
    tokenizer: str, tmp_path: Path, monkeypatch
) -> None:
    """Only the command itself is killed; its workers, also busy or just begun ones, end without being told."""
    layouts.openwebtext(
        tmp_path / "hub", list(documents(300, seed=2))[10:], n_files=6, row_group_size=10
    )
    larger = recipe_of("OpenWebText", tmp_path / "hub", tokenizer=tokenizer, val_fraction=0.2)
    begun, rng, undisturbed = time.monotonic(), random.Random(0), tmp_path / "undisturbed"
    assert finish(start(lambda: make(undisturbed, larger, workers=2))) == 0
    duration = time.monotonic() - begun
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name, call=ctypes.CDLL: (time.sleep(0.5), call(name))[1]
    )
    for number in range(3):
        process = start(lambda number=number: make(tmp_path / str(number), larger, workers=2))
        if number == 0:  # the workers have not said yet that they want to end with it
            wait_for(lambda process=process: len(members(process.pid)) > 1)
            monkeypatch.undo()
        else:
            time.sleep(rng.uniform(0.1, 0.9) * duration)
        process.kill()
        process.join()
        wait_for(lambda process=process: members(process.pid) == [])
        assert_makes(tmp_path / str(number), larger, undisturbed, workers=2)


@pytest.mark.parametrize(("workers", "code"), [(1, errno.ENOSPC), (2, errno.EDQUOT)])
def test_a_full_disk(
    recipe: Recipe, finished: Path, out: Path, monkeypatch, workers: int, code: int
) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    for number in (1, 2, 4, 6):
        calls = itertools.count(1)
        with monkeypatch.context() as patch:
            patch.setattr(
                os, "fsync", lambda _, calls=calls, number=number: next(calls) >= number and fail()
            )
            with pytest.raises(
                UserError,
                match=r"The disk of .*out is full: free some space; what is done .* is kept",
            ):
                make(out, recipe, workers)
        assert not list(out.rglob("*.tmp-*"))
    assert_makes(out, recipe, finished, workers=workers)


def before_task_3(then: Callable[[Job], object]) -> Callable[[Job, Task], int]:
    return lambda job, task: (task.number == 3 and then(job), encode_task(job, task))[1]


def test_a_worker_that_is_killed(recipe: Recipe, finished: Path, out: Path, monkeypatch) -> None:
    killed = before_task_3(lambda job: os.kill(os.getpid(), signal.SIGKILL))
    monkeypatch.setattr(executors, "encode_task", killed)
    with pytest.raises(
        UserError,
        match="A worker process was killed, perhaps for want of memory: what is done so far",
    ):
        make(out, recipe, workers=2)
    monkeypatch.undo()
    assert_makes(out, recipe, finished, workers=2)


@pytest.mark.parametrize(("number", "workers", "code"), [
    (signal.SIGINT, 1, 1), (signal.SIGINT, 2, 1), (signal.SIGTERM, 1, 75), (signal.SIGTERM, 2, 75),
    (signal.SIGHUP, 2, 75),
])  # fmt: skip
@pytest.mark.parametrize("are_slow", [False, True], ids=["", "slow workers"])
def test_a_signal_to_the_group(
    recipe: Recipe, finished: Path, out: Path, monkeypatch, number: int, workers: int, code: int,
    are_slow: bool,
) -> None:  # fmt: skip
    """A terminal or scancel sends it to the command and to its workers alike; none of them works on.

    A slow worker, here a stopped one, has not seen that signal yet when the command ends it.
    """
    without_end = before_task_3(lambda job: (out.with_name("reached").touch(), time.sleep(600)))
    monkeypatch.setattr(executors, "encode_task", without_end)
    monkeypatch.setitem(RECIPES, "OpenWebText", recipe)
    words, printed = (
        ["prepare", "OpenWebText", "--output", str(out), "--workers", str(workers)],
        out.with_name("said"),
    )
    process = start(lambda: sys.exit(main(words)), printed)
    monkeypatch.undo()
    wait_for(out.with_name("reached").exists)
    if are_slow:
        for worker in {*members(process.pid)} - {process.pid}:
            os.kill(worker, signal.SIGSTOP)
    os.killpg(process.pid or 0, number)
    assert finish(process) == code
    assert printed.read_text().endswith(
        "Interrupted: what is done so far is kept, repeat the command to go on.\n"
    )
    assert "Traceback" not in printed.read_text()
    wait_for(lambda: members(process.pid) == [])
    assert_makes(out, recipe, finished)
