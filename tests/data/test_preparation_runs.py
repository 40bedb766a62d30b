"""Workers, a cluster, kills, interruptions, a full disk: the same command goes on, and makes the same files."""

import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from anlit.cli import main
from anlit.data.preparation import executors
from anlit.data.preparation.encode import Job, Task, encode_task
from anlit.data.preparation.recipes import CORPORA, Recipe
from anlit.errors import UserError
from tests.data import layouts
from tests.data.devices import free_port
from tests.data.layouts import documents
from tests.data.preparing import (
    SIZES,
    SMALL,
    assert_holds,
    assert_makes,
    by_split,
    finish,
    hashes,
    make,
    members,
    recipe_of,
    start,
    text_file_source,
    wait_for,
    written,
)

KILLED = 9
STEPS = ("replace", "fsync", "unlink", "mkdir", "rmdir")
"""What changes the file system for others to see, apart from writing into files that have no lasting name yet."""


@pytest.fixture(scope="module")
def small_corpus(tokenizer: str, place: Path) -> Recipe:
    """Several tasks and chunks in each of nine streams."""
    some = list(documents(130, seed=8))[10:]
    splits = {"train": some[:100], "validation": some[100:110], "test": some[110:]}
    layouts.slimpajama(place / "small", splits, n_files=4)
    return recipe_of("SlimPajama", place / "small", {"task_bytes": 3_000, "chunk_bytes": 2_001}, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def made_by_one(small_corpus: Recipe, place: Path) -> Path:
    make(place / "made by one", small_corpus)
    assert len(written(place / "made by one")) > 4
    return place / "made by one"


def test_processes_at_once_wait_for_each_other(small_corpus: Recipe, made_by_one: Path, out: Path) -> None:
    printed = out.with_name("printed")
    processes = [start(lambda: make(out, small_corpus, 2), printed) for _ in range(3)]
    assert [finish(process) for process in processes] == [0] * 3
    assert printed.read_text().count(f"Another process is preparing {out}: waiting for it.") == 2
    assert hashes(out) == hashes(made_by_one)


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


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("distributed")
    (tmp_path / "killer.py").write_text(KILLER)
    address = f"tcp://127.0.0.1:{free_port()}"
    scheduler = ["scheduler", "--host", "127.0.0.1", "--port", address.rpartition(":")[2]]
    worker = ["worker", address, "--nthreads", "1", "--preload", "killer.py"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": (tmp_path / "log").open("w"), "cwd": tmp_path}
    with ExitStack() as stack:
        for command in (scheduler, worker, worker):
            words = [sys.executable, "-m", "dask", *command, "--no-dashboard"]
            process = stack.enter_context(subprocess.Popen(words, env=os.environ, **quiet))
            stack.callback(process.terminate)
        yield address


def test_a_cluster_makes_the_same_folder_though_a_worker_is_killed(
    cluster: str, small_corpus: Recipe, made_by_one: Path, out: Path,
    monkeypatch, capsys,
) -> None:  # fmt: skip
    assert_makes(out, small_corpus, made_by_one, cluster=cluster)
    assert out.with_name("killed").exists()
    layouts.openwebtext(out.with_name("hub"), ["a", "b"], n_files=1)[0].write_bytes(b"PAR1")
    monkeypatch.chdir(out.parent)
    assert main(["prepare", "OpenWebText", "--source", "hub", "--tokenizer", "bpe", "--cluster", cluster]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "hub/plain_text/train-00000-of-00080.parquet, the file: it has no readable parquet footer" in said


def test_a_cluster_that_is_not_there(recipe: Recipe, out: Path, monkeypatch) -> None:
    monkeypatch.setattr(executors, "CONTACT_SECONDS", 0.5)
    for address in (f"tcp://127.0.0.1:{free_port()}", "nowhere"):
        with pytest.raises(UserError, match=f"No Dask scheduler answers at --cluster {address}: start one"):
            make(out, recipe, cluster=address)


@pytest.mark.parametrize("task_bytes", [1000, 1 << 30])
def test_the_size_of_tasks_does_not_change_the_tokens(
    tokenizer: str, tmp_path: Path, out: Path, task_bytes: int
) -> None:
    some = list(documents(80, seed=9))[10:]
    options = {"text_field": "content", "tokenizer": tokenizer, "val_fraction": 0.2}
    options["pattern"] = text_file_source(tmp_path / "text", some)
    make(out, recipe_of("TextFiles", tmp_path / "text", SMALL | {"task_bytes": task_bytes}, **options))
    assert len(written(out)) > 20 or task_bytes > 1000
    assert_holds(out, by_split(some, 0.2))


def killed_at(then: Callable[[int], object], folder: Path, recipe: Recipe) -> int | None:
    """The exit code of a process that prepares, and calls `then` with the number of each step before it takes it."""

    def work() -> None:
        numbers = itertools.count(1)
        for name in STEPS:
            step = getattr(os, name)
            setattr(os, name, lambda *args, step=step, **kwargs: (then(next(numbers)), step(*args, **kwargs))[1])
        make(folder, recipe)

    return finish(start(work))


@pytest.fixture(scope="module")
def trained(place: Path) -> Recipe:
    layouts.openwebtext(place / "killed", list(documents(50, seed=1))[10:], n_files=4, row_group_size=4)
    return recipe_of("OpenWebText", place / "killed", SIZES, tokenizer="bpe", vocab_size=280, val_fraction=0.2)


@pytest.fixture(scope="module")
def undisturbed(trained: Recipe, place: Path) -> Path:
    assert make(place / "undisturbed", trained)["train"]["chunks"] > 3
    assert len(written(place / "undisturbed")) > 4
    return place / "undisturbed"


def test_killed_before_any_step(trained: Recipe, undisturbed: Path, tmp_path: Path) -> None:
    """Each of the first and the last steps, and every eighth of those between."""
    count = tmp_path / "steps"
    assert killed_at(lambda number: count.write_text(str(number)), tmp_path / "counted", trained) == 0
    n_steps = int(count.read_text())
    for step in [*range(1, 12), *range(12, n_steps - 12, 8), *range(n_steps - 12, n_steps + 1)]:
        folder = tmp_path / str(step)
        assert killed_at(lambda number, step=step: number == step and os._exit(KILLED), folder, trained) == KILLED
        assert_makes(folder, trained, undisturbed)
        shutil.rmtree(folder)


def test_killed_at_random_moments_with_two_workers(tokenizer: str, tmp_path: Path) -> None:
    """Only the command itself is killed; its workers, also busy ones, end without being told."""
    layouts.openwebtext(tmp_path / "hub", list(documents(300, seed=2))[10:], n_files=6, row_group_size=10)
    larger = recipe_of("OpenWebText", tmp_path / "hub", tokenizer=tokenizer, val_fraction=0.2)
    begun = time.monotonic()
    assert finish(start(lambda: make(tmp_path / "undisturbed", larger, workers=2))) == 0
    duration, rng = time.monotonic() - begun, random.Random(0)
    for number in range(2):
        process = start(lambda number=number: make(tmp_path / str(number), larger, workers=2))
        time.sleep(rng.uniform(0.1, 0.9) * duration)
        process.kill()
        process.join()
        wait_for(lambda process=process: members(process.pid or 0) == [])
        assert_makes(tmp_path / str(number), larger, tmp_path / "undisturbed", workers=2)


@pytest.mark.parametrize(("workers", "code"), [(1, errno.ENOSPC), (2, errno.EDQUOT)])
def test_a_full_disk(recipe: Recipe, finished: Path, out: Path, monkeypatch, workers: int, code: int) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    for number in (1, 2, 4, 6):
        calls = itertools.count(1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda _, calls=calls, number=number: next(calls) >= number and fail())
            with pytest.raises(UserError, match=r"The disk of .*out is full: free some space; what is done .* is kept"):
                make(out, recipe, workers)
        assert not list(out.rglob("*.tmp-*"))
    assert_makes(out, recipe, finished, workers=workers)


def before_task_3(then: Callable[[Job], object]) -> Callable[[Job, Task], int]:
    return lambda job, task: (task.number == 3 and then(job), encode_task(job, task))[1]


def test_a_worker_that_is_killed(recipe: Recipe, finished: Path, out: Path, monkeypatch) -> None:
    killed = before_task_3(lambda job: os.kill(os.getpid(), signal.SIGKILL))
    monkeypatch.setattr(executors, "encode_task", killed)
    with pytest.raises(UserError, match="A worker process was killed, perhaps for want of memory: what is done so far"):
        make(out, recipe, workers=2)
    monkeypatch.undo()
    assert_makes(out, recipe, finished, workers=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_control_c(recipe: Recipe, finished: Path, out: Path, monkeypatch, workers: int) -> None:
    """A terminal sends SIGINT to the command and to its workers alike; none of them works on."""
    without_end = before_task_3(lambda job: (out.with_name("reached").touch(), time.sleep(600)))
    monkeypatch.setattr(executors, "encode_task", without_end)
    monkeypatch.setitem(CORPORA, "OpenWebText", (lambda options: recipe, frozenset()))
    words, printed = ["prepare", "OpenWebText", "--output", str(out), "--workers", str(workers)], out.with_name("said")
    process = start(lambda: sys.exit(main(words)), printed)
    monkeypatch.undo()
    wait_for(out.with_name("reached").exists)
    os.killpg(process.pid or 0, signal.SIGINT)
    assert finish(process) == 1
    assert printed.read_text().endswith("Interrupted: what is done so far is kept, repeat the command to go on.\n")
    assert "Traceback" not in printed.read_text()
    wait_for(lambda: members(process.pid or 0) == [])
    assert_makes(out, recipe, finished)
