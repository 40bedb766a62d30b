"""A preparation that is killed, interrupted or out of space: the same command goes on and makes the same files."""

import errno
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from anlit.data.preparation import executors
from anlit.data.preparation.encode import Job, Task, encode_task
from anlit.data.preparation.recipes import CORPORA, Recipe
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import documents
from tests.data.preparing import (
    SIZES,
    finish,
    hashes,
    make,
    members,
    read_json,
    recipe_of,
    start,
    start_command,
    wait_for,
    written,
)

KILLED = 9
STEPS = ("replace", "fsync", "unlink", "mkdir", "rmdir")
"""What changes the file system for others to see, apart from writing into files that have no lasting name yet."""


def count_steps(then: Callable[[int], object]) -> None:
    """Call `then` with the number of each step, from 1, before this process takes it."""
    numbers = itertools.count(1)
    for name in STEPS:
        step = getattr(os, name)
        setattr(os, name, lambda *args, step=step, **kwargs: (then(next(numbers)), step(*args, **kwargs))[1])


def killed_at(step: int, folder: Path, recipe: Recipe) -> int | None:
    """Prepare in a process that dies before a step; its exit code, 0 if there were not so many steps."""

    def work() -> None:
        count_steps(lambda number: number == step and os._exit(KILLED))
        make(folder, recipe)

    return finish(start(work))


@pytest.fixture(scope="module")
def trained(place: Path) -> Recipe:
    """Several tasks, with held-out documents to count and a tokenizer to train."""
    layouts.openwebtext(place / "killed", list(documents(50, seed=1))[10:], n_files=4, row_group_size=4)
    return recipe_of("OpenWebText", place / "killed", SIZES, tokenizer="bpe", vocab_size=280, val_fraction=0.2)


@pytest.fixture(scope="module")
def undisturbed(trained: Recipe, place: Path) -> Path:
    make(place / "undisturbed", trained)
    assert len(written(place / "undisturbed")) > 4
    assert read_json(place / "undisturbed" / "manifest.json")["train"]["chunks"] > 3
    return place / "undisturbed"


def test_killed_before_any_step(trained: Recipe, undisturbed: Path, tmp_path: Path) -> None:
    """Each of the first and the last steps, and every eighth of those between."""

    def count() -> None:
        steps: list[int] = []
        count_steps(steps.append)
        make(tmp_path / "counted", trained)
        (tmp_path / "steps").write_text(str(len(steps)))

    assert finish(start(count)) == 0
    n_steps = int((tmp_path / "steps").read_text())
    for step in [*range(1, 12), *range(12, n_steps - 12, 8), *range(n_steps - 12, n_steps + 1)]:
        folder = tmp_path / str(step)
        assert killed_at(step, folder, trained) == KILLED
        make(folder, trained)
        assert hashes(folder) == hashes(undisturbed), step
        shutil.rmtree(folder)
    assert killed_at(n_steps + 1, tmp_path / "whole", trained) == 0


def test_a_repair_that_is_killed_again_and_again(trained: Recipe, undisturbed: Path, tmp_path: Path) -> None:
    """A process dies after a few steps, another goes on and dies, until one comes to the end."""
    shutil.copytree(undisturbed, tmp_path / "out")
    for path in [*sorted((tmp_path / "out" / "train").iterdir())[1::2], tmp_path / "out" / "tokenizer.json"]:
        path.unlink()
    rng, deaths = random.Random(0), 0
    while killed_at(rng.randrange(2, 40), tmp_path / "out", trained) == KILLED:
        deaths += 1
        assert deaths < 200
    assert deaths > 1
    assert hashes(tmp_path / "out") == hashes(undisturbed)


def test_killed_at_random_moments_with_two_workers(tokenizer: str, tmp_path: Path) -> None:
    """Only the command itself is killed; its workers, also busy ones, end without being told."""
    layouts.openwebtext(tmp_path / "hub", list(documents(300, seed=2))[10:], n_files=6, row_group_size=10)
    larger = recipe_of("OpenWebText", tmp_path / "hub", tokenizer=tokenizer, val_fraction=0.2)
    begun = time.monotonic()
    assert finish(start(lambda: make(tmp_path / "undisturbed", larger, workers=2))) == 0
    duration, rng = time.monotonic() - begun, random.Random(0)
    for number in range(3):
        process = start(lambda number=number: make(tmp_path / str(number), larger, workers=2))
        time.sleep(rng.uniform(0.1, 0.9) * duration)
        process.kill()
        process.join()
        wait_for(lambda process=process: members(process.pid or 0) == [])
        make(tmp_path / str(number), larger, workers=2)
        assert hashes(tmp_path / str(number)) == hashes(tmp_path / "undisturbed")


@pytest.mark.parametrize(("workers", "code"), [(1, errno.ENOSPC), (2, errno.EDQUOT)])
def test_a_full_disk(
    recipe: Recipe, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, code: int
) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    for number in (1, 2, 4, 6):
        calls = itertools.count(1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda _, calls=calls, number=number: next(calls) >= number and fail())
            with pytest.raises(UserError, match=r"The disk of .*out is full: free some space; what is done .* is kept"):
                make(tmp_path / "out", recipe, workers)
        assert not list((tmp_path / "out").rglob("*.tmp-*"))
    make(tmp_path / "out", recipe, workers)
    assert hashes(tmp_path / "out") == hashes(finished)


def encode_or_be_killed(job: Job, task: Task) -> int:
    if task.number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode_task(job, task)


def encode_without_end(job: Job, task: Task) -> int:
    """Also tells that it has come so far."""
    if task.number == 3:
        (job.folder.parent / "reached").touch()
        time.sleep(600)
    return encode_task(job, task)


def test_a_worker_that_is_killed(
    recipe: Recipe, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "encode_task", encode_or_be_killed)
    with pytest.raises(UserError, match="A worker process was killed, perhaps for want of memory: what is done so far"):
        make(tmp_path / "out", recipe, workers=2)
    monkeypatch.undo()
    make(tmp_path / "out", recipe, workers=2)
    assert hashes(tmp_path / "out") == hashes(finished)


@pytest.mark.parametrize("workers", [1, 2])
def test_control_c(
    recipe: Recipe, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """A terminal sends SIGINT to the command and to its workers alike; none of them works on."""
    monkeypatch.setattr(executors, "encode_task", encode_without_end)
    monkeypatch.setitem(CORPORA, "OpenWebText", (lambda options: recipe, frozenset()))
    arguments = ["prepare", "OpenWebText", "--output", str(tmp_path / "out"), "--workers", str(workers)]
    process = start_command(arguments, tmp_path / "output")
    monkeypatch.undo()
    wait_for((tmp_path / "reached").exists)
    os.killpg(process.pid or 0, signal.SIGINT)
    assert finish(process) == 1
    printed = (tmp_path / "output").read_text()
    assert printed.endswith("Interrupted: what is done so far is kept, repeat the command to go on.\n")
    assert "Traceback" not in printed
    wait_for(lambda: members(process.pid or 0) == [])
    make(tmp_path / "out", recipe)
    assert hashes(tmp_path / "out") == hashes(finished)
