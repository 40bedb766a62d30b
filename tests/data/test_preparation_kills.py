"""`anlit prepare` killed at any moment and started again makes the same files as if nothing had happened."""

import functools
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anlit.data.preparation import workers
from anlit.data.preparation.recipe import Recipe
from tests.data import layouts
from tests.data.layouts import documents
from tests.data.preparing import (
    KILLED,
    SIZES,
    finish,
    hashes,
    make,
    members,
    read_json,
    read_sources,
    recipe_of,
    start,
    wait_for,
)

STEPS = ("replace", "fsync", "unlink", "mkdir", "rmdir")
"""What changes the file system for others to see, apart from writing into files that have no lasting name yet."""


def at_step(number: int, then: Callable[[], None]) -> None:
    """In this process and those that it forks, do something before step `number` of its own (counted from 1).

    The step may also be the last thing that has happened when the next one is disturbed: so all the moments between
    two steps are covered.
    """
    begun = itertools.count(1)

    def disturbed(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if next(begun) == number:
                then()
            return step(*args, **kwargs)

        return wrapper

    for name in STEPS:
        setattr(os, name, disturbed(getattr(os, name)))


def die() -> None:
    os._exit(KILLED)


def killed_at(number: int, folder: Path, recipe: Recipe) -> int | None:
    """Prepare in a process that dies before step `number`; its exit code, 0 if there were not so many steps."""

    def work() -> None:
        at_step(number, die)
        make(folder, recipe)

    return finish(start(work))


@pytest.fixture(scope="module")
def recipe(place: Path) -> Recipe:
    """Several groups, with held-out documents to count and a tokenizer to train."""
    folder = place / "hub of the killed"
    layouts.openwebtext(folder, list(documents(50, seed=1))[10:], n_files=4, row_group_size=4)
    return recipe_of("OpenWebText", folder, SIZES, tokenizer="bpe", vocab_size=280, val_fraction=0.2)


@pytest.fixture(scope="module")
def undisturbed(recipe: Recipe, place: Path) -> Path:
    folder = place / "undisturbed"
    make(folder, recipe)
    assert len(read_sources(folder)) > 2
    assert read_json(folder / "manifest.json")["train"]["chunks"] > 3
    return folder


@pytest.fixture(scope="module")
def n_steps(recipe: Recipe, place: Path) -> int:
    """How many steps an undisturbed preparation has."""

    def count() -> None:
        steps = itertools.count()
        for name in STEPS:
            step = getattr(os, name)
            setattr(os, name, lambda *args, step=step, **kwargs: (next(steps), step(*args, **kwargs))[1])
        make(place / "counted", recipe)
        (place / "steps").write_text(str(next(steps)))

    assert finish(start(count)) == 0
    return int((place / "steps").read_text())


def test_killed_at_any_step(recipe: Recipe, undisturbed: Path, n_steps: int, tmp_path: Path) -> None:
    """Each of the last steps, of which the manifest is one, and every so many of those before."""
    numbers = [*range(1, n_steps - 12, 29), *range(n_steps - 12, n_steps + 1, 4)]
    for number in numbers:
        folder = tmp_path / str(number)
        assert killed_at(number, folder, recipe) == KILLED
        assert hashes(folder) != hashes(undisturbed)
        make(folder, recipe)
        assert hashes(folder) == hashes(undisturbed), number
    assert killed_at(n_steps + 1, tmp_path / "whole", recipe) == 0


@pytest.mark.parametrize("lost", [[], ["tokenizer.json", "val/index.json", "train/chunk-000001-00000-000.bin"]])
def test_killed_again_and_again(
    lost: list[str], recipe: Recipe, undisturbed: Path, n_steps: int, tmp_path: Path
) -> None:
    """A process dies after a few steps, another goes on and dies, until one comes to the end; also of a repair."""
    if lost:
        shutil.copytree(undisturbed, tmp_path / "out")
    for name in lost:
        (tmp_path / "out" / name).unlink()
    rng = random.Random(0)
    deaths = 0
    while killed_at(rng.randrange(4, 40), tmp_path / "out", recipe) == KILLED:
        deaths += 1
        assert deaths < n_steps
    assert deaths > 3
    assert hashes(tmp_path / "out") == hashes(undisturbed)


def test_a_shard_killed_at_its_last_steps(recipe: Recipe, undisturbed: Path, tmp_path: Path) -> None:
    """The other shard has ended before: what is left to publish must be found by whoever comes."""
    make(tmp_path / "half", recipe, shard=1, shards=2)
    for number in range(1, 200, 23):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "half", folder)

        def work(number: int = number, folder: Path = folder) -> None:
            at_step(number, die)
            make(folder, recipe, shard=0, shards=2)

        if finish(start(work)) == 0:
            break
        make(folder, recipe, shard=number % 2, shards=2)
        make(folder, recipe, shard=0, shards=2)
        assert hashes(folder) == hashes(undisturbed), number
    else:
        pytest.fail("it never came to its end")


@pytest.mark.parametrize("step", [2, 9])
def test_workers_whose_parent_is_killed_do_no_harm(
    recipe: Recipe, undisturbed: Path, tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker kills the command and works on, while the same command is started again at once."""

    def begin_worker(parent: int, begin: Callable[[int], None] = workers._begin_worker) -> None:
        begin(parent)
        at_step(step, lambda: os.kill(parent, signal.SIGKILL))

    with monkeypatch.context() as patch:
        patch.setattr(workers, "_begin_worker", begin_worker)
        process = start(lambda: make(tmp_path / "out", recipe, workers=2))
        assert finish(process) == -signal.SIGKILL
    make(tmp_path / "out", recipe, workers=2)
    assert hashes(tmp_path / "out") == hashes(undisturbed)
    assert process.pid is not None
    wait_for(lambda: members(process.pid or 0) == [])


def test_killed_at_random_moments_with_two_workers(tokenizer: str, tmp_path: Path) -> None:
    """Only the command itself is killed; its workers, also busy ones, end without being told."""
    layouts.openwebtext(tmp_path / "hub", list(documents(300, seed=2))[10:], n_files=6, row_group_size=10)
    sizes = {"task_bytes": 20_000, "group_bytes": 60_000, "chunk_bytes": 50_001}
    larger = recipe_of("OpenWebText", tmp_path / "hub", sizes, tokenizer=tokenizer, val_fraction=0.2)
    begun = time.monotonic()
    assert finish(start(lambda: make(tmp_path / "undisturbed", larger, workers=2))) == 0
    duration = time.monotonic() - begun
    rng = random.Random(0)
    for number in range(4):
        process = start(lambda number=number: make(tmp_path / str(number), larger, workers=2))
        time.sleep(rng.uniform(0.1, 0.9) * duration)
        process.kill()
        process.join()
        assert process.pid is not None
        wait_for(lambda process=process: members(process.pid) == [])
        make(tmp_path / str(number), larger, workers=2)
        assert hashes(tmp_path / str(number)) == hashes(tmp_path / "undisturbed")
