"""Workers, shards, processes at once and the size of tasks: not a byte depends on them."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from anlit.cli import main
from anlit.data.preparation.recipe import Recipe
from anlit.data.preparation.workspace import Workspace
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import documents
from tests.data.preparing import (
    SMALL,
    assert_holds,
    finish,
    hashes,
    make,
    read_sources,
    recipe_of,
    start,
    text_file_source,
    wait_for,
    write_texts,
)


@pytest.fixture(scope="module")
def small_corpus(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Several groups, tasks and chunks in each of nine streams."""
    folder = tmp_path_factory.mktemp("small")
    some = list(documents(130, seed=8))[10:]
    by_folder = {"train": some[:100], "validation": some[100:110], "test": some[110:]}
    layouts.slimpajama(folder, by_folder, n_files=4)
    sizes = {"task_bytes": 3_000, "group_bytes": 10_000, "chunk_bytes": 2_001}
    return recipe_of("SlimPajama", folder, sizes, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def made_by_one(small_corpus: Recipe, place: Path) -> dict[str, str]:
    make(place / "made by one", small_corpus)
    assert len(read_sources(place / "made by one")) > 2
    return hashes(place / "made by one")


def test_workers_do_not_change_a_byte(small_corpus: Recipe, made_by_one: dict[str, str], tmp_path: Path) -> None:
    make(tmp_path / "out", small_corpus, workers=3)
    assert hashes(tmp_path / "out") == made_by_one


@pytest.mark.parametrize("ways", [[(0, 1), (0, 1)], [(0, 3), (1, 3), (2, 3), (2, 3)]])
def test_processes_at_once_do_not_change_a_byte(
    small_corpus: Recipe, made_by_one: dict[str, str], tmp_path: Path, ways: list[tuple[int, int]]
) -> None:
    def work(shard: int, shards: int) -> Callable[[], None]:
        return lambda: (make(tmp_path / "out", small_corpus, workers=2, shard=shard, shards=shards), None)[1]

    processes = [start(work(*way)) for way in ways]
    assert [finish(process) for process in processes] == [0] * len(ways)
    assert hashes(tmp_path / "out") == made_by_one


@pytest.mark.parametrize("work", ["0-of-1", "folder"])
def test_a_second_process_waits_for_the_first(
    small_corpus: Recipe, made_by_one: dict[str, str], tmp_path: Path, work: str
) -> None:
    """For one with the same part of the work, and for one that plans or publishes."""
    with Workspace(tmp_path / "out").lock(work):
        process = start(lambda: make(tmp_path / "out", small_corpus), tmp_path / "printed")
        waiting = "Another process is preparing"
        wait_for(lambda: (tmp_path / "printed").exists() and waiting in (tmp_path / "printed").read_text())
        assert hashes(tmp_path / "out") == {}
    assert finish(process) == 0
    assert hashes(tmp_path / "out") == made_by_one


def test_a_process_that_divides_the_work_otherwise(
    small_corpus: Recipe, made_by_one: dict[str, str], tmp_path: Path
) -> None:
    """It would remove what the other is about to write."""
    for shard, shards, other in ((0, 2, "0 of 1"), (0, 1, "1 of 2")):
        part = tuple(int(number) for number in other.split(" of "))
        with (
            Workspace(tmp_path / "out").shard_lock(*part),
            pytest.raises(UserError, match=rf"out as part {other}, and this one is part {shard} of {shards}: wait"),
        ):
            make(tmp_path / "out", small_corpus, shard=shard, shards=shards)
    make(tmp_path / "out", small_corpus)
    assert hashes(tmp_path / "out") == made_by_one


@pytest.mark.parametrize("task_bytes", [1, 1 << 30])
def test_the_size_of_tasks_does_not_change_the_tokens(tokenizer: str, tmp_path: Path, task_bytes: int) -> None:
    some = list(documents(80, seed=9))[10:]
    pattern = text_file_source(tmp_path / "text", some, ".jsonl")
    sizes = SMALL | {"task_bytes": task_bytes}
    options = {"pattern": pattern, "text": "content", "tokenizer": tokenizer, "val_fraction": 0.2}
    make(tmp_path / "out", recipe_of("TextFiles", tmp_path / "text", sizes, **options))
    val = [text for text in some if int(sha256(text.encode()).hexdigest()[:8], 16) < 0.2 * 2**32]
    assert_holds(tmp_path / "out", {"val": val, "train": [text for text in some if text not in val]})


def test_names_of_all_kinds(tokenizer: str, tmp_path: Path) -> None:
    """Line separators, letters beyond ASCII and bytes that are not UTF-8 in the names of files."""
    names = ["a\u2028b.txt", "c\x85d.txt", "größe.txt", "new\nline.txt", "\udcff.txt", "latin\udce4.txt"]
    (tmp_path / "text").mkdir()
    for name in names:
        (tmp_path / "text" / name).write_bytes(name.encode("utf-8", "surrogateescape"))
    recipe = recipe_of("TextFiles", tmp_path / "text", tokenizer=tokenizer, val_fraction=0.5)
    manifest = make(tmp_path / "out", recipe)
    assert manifest["documents"] == 4
    assert sorted(manifest["skipped"]["not_utf8"]["listed"]) == sorted(names[4:])
    assert {file["name"] for group in read_sources(tmp_path / "out") for file in group["files"]} == set(names[:4])
    chunk = next((tmp_path / "out" / "train").glob("chunk-*.bin"))
    before = hashes(tmp_path / "out")
    chunk.unlink()
    assert make(tmp_path / "out", recipe) == manifest
    assert hashes(tmp_path / "out") == before


def test_a_source_is_the_same_however_it_is_named(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "text", list(documents(30, seed=4))[10:])
    monkeypatch.chdir(tmp_path)
    manifest = make(tmp_path / "out", recipe_of("TextFiles", Path("text"), tokenizer=tokenizer))
    assert make(tmp_path / "out", recipe_of("TextFiles", tmp_path / "text", tokenizer=tokenizer)) == manifest
    monkeypatch.chdir(tmp_path / "text")
    assert make(tmp_path / "out", recipe_of("TextFiles", Path(), tokenizer=tokenizer)) == manifest


@pytest.mark.parametrize("pattern", ["", "/etc/*.txt", "a/../../*.txt"])
def test_patterns_that_are_none(pattern: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["prepare", "TextFiles", "--source", str(tmp_path), "--output", str(tmp_path / "out")]
    assert main([*words, "--pattern", pattern]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f'anlit: error: The pattern "{pattern}" is not one for files under {tmp_path}: give one')
