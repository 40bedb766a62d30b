"""`anlit prepare` killed at any moment and started again makes the same files as if nothing had happened."""

import functools
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from anlit.data.preparation import workers
from anlit.data.preparation.catalogue import python_files
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


def test_killed_again_and_again(recipe: Recipe, undisturbed: Path, n_steps: int, tmp_path: Path) -> None:
    """A process that dies after a few steps, another that goes on and dies, until one comes to the end."""
    rng = random.Random(0)
    deaths = 0
    while killed_at(rng.randrange(4, 40), tmp_path / "out", recipe) == KILLED:
        deaths += 1
        assert deaths < n_steps
    assert deaths > 3
    assert hashes(tmp_path / "out") == hashes(undisturbed)


def test_killed_while_repairing(recipe: Recipe, undisturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(undisturbed, tmp_path / "out")
    lost = ["train/chunk-000001-00000-000.bin", "val/chunk-000000-00000-000.bin"]
    for name in ("tokenizer.json", "val/index.json", *lost):
        (tmp_path / "out" / name).unlink()
    rng = random.Random(1)
    deaths = 0
    while killed_at(rng.randrange(4, 40), tmp_path / "out", recipe) == KILLED:
        deaths += 1
        assert deaths < 200
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


@pytest.mark.parametrize("step", [2, 5, 9, 14])
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


KILLS = 20
MEGABYTES = 210
AS_SHIPPED = "from anlit.cli import main"
SMALL_GROUPS = """
import functools
from anlit.cli import main
from anlit.data.preparation import catalogue, recipe
catalogue.Recipe = functools.partial(recipe.Recipe, group_bytes=8 << 20, chunk_bytes=8 << 20)
"""
"""So that 200 MB, about 50 MB when compressed, have several groups as terabytes do."""


class Command:
    """`anlit prepare SlimPajama` as a user starts it, in a folder of its own."""

    def __init__(self, program: str, hub: Path, tokenizer: Path) -> None:
        options = ["--source", str(hub), "--tokenizer", str(tokenizer), "--output", "out", "--workers", "2"]
        program = f"{program}\nimport sys\nsys.exit(main(sys.argv[1:]))"
        self.arguments = [sys.executable, "-c", program, "prepare", "SlimPajama", *options]

    def start(self, folder: Path) -> subprocess.Popen:
        folder.mkdir(exist_ok=True)
        with open(folder / "log", "a") as log:
            return subprocess.Popen(self.arguments, cwd=folder, start_new_session=True, stdout=log, stderr=log)

    def run(self, folder: Path) -> float:
        """To the end; seconds."""
        begun = time.monotonic()
        assert self.start(folder).wait() == 0, (folder / "log").read_text()
        return time.monotonic() - begun


def how_far(folder: Path) -> str:
    """What a killed preparation has left."""
    if (folder / "manifest.json").exists():
        return "manifest written"
    work = folder / ".work"
    groups, tasks = len(list(work.glob("groups/*.json"))), len(list(work.glob("tasks/*-?????.json")))
    temporary = len(list(folder.rglob("*.tmp-*")))
    return f"{groups} groups and {tasks} tasks done, {temporary} files begun" if work.exists() else "nothing yet"


def python_texts(size: int) -> Iterator[str]:
    """The interpreter's sources, again and again, each time with another first line, until they have `size` bytes."""
    sources = [path.read_text(encoding="utf-8", errors="replace") for path in python_files(False).values()]
    for repetition, source in ((number, source) for number in itertools.count() for source in sources):
        yield f"# {repetition}\n{source}"
        size -= len(source.encode())
        if size <= 0:
            return


@pytest.mark.slow
def test_killed_at_random_moments_of_200_megabytes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Twenty, each of a preparation of its own. Prints a line for each (pytest -s)."""
    place = tmp_path_factory.mktemp("killed")
    texts = list(python_texts(MEGABYTES * 1_000_000))
    size = sum(len(text.encode()) for text in texts)
    layouts.slimpajama(place / "hub", {"train": texts[50:]}, n_files=MEGABYTES // 2)
    layouts.slimpajama(place / "hub", {"validation": texts[:50]}, n_files=1)
    tokenizer = word_tokenizer(place / "tokenizer.json", iter(texts[:300]))
    commands = {name: Command(program, place / "hub", tokenizer)
                for name, program in (("small groups", SMALL_GROUPS), ("as shipped", AS_SHIPPED))}  # fmt: skip
    expected, seconds = {}, {}
    for name, command in commands.items():
        seconds[name] = command.run(place / name)
        expected[name] = hashes(place / name / "out")
        n_groups = len(read_sources(place / name / "out"))
        print(f"{size / 1e6:.0f} MB {name}: {n_groups} groups, {len(expected[name])} files, {seconds[name]:.0f} s")
    rng, kills = random.Random(0), 0
    while kills < KILLS:
        name = "as shipped" if kills % 4 == 3 else "small groups"
        folder, moment = place / "killed", rng.uniform(0.02, 1) * seconds[name]
        process = commands[name].start(folder)
        time.sleep(moment)
        process.kill()
        if process.wait() == 0:  # it has come to its end before: the machine has become faster
            seconds[name] *= 0.8
        else:
            wait_for(lambda process=process: members(process.pid) == [])
            left = how_far(folder / "out")
            commands[name].run(folder)
            assert hashes(folder / "out") == expected[name], f"{name}, killed after {moment:.1f} s: {left}"
            kills += 1
            print(f"kill {kills:2}, {name}, after {moment:5.1f} s: {left}; the same in the end")
        shutil.rmtree(folder)


def word_tokenizer(path: Path, texts: Iterator[str]) -> Path:
    """A tokenizer of whole words, several times as fast as a BPE: what is continued is the same."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # takes the end of a document inside a text apart
    special = ["<|endoftext|>", "[UNK]"]
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=4096, special_tokens=special))
    tokenizer.save(str(path))
    return path
