"""Workers, a cluster, processes at once and the size of tasks: not a byte depends on them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import pytest
from filelock import FileLock

from anlit.cli import main
from anlit.data.preparation import executors
from anlit.data.preparation.recipes import Recipe
from anlit.errors import UserError
from tests.data import layouts
from tests.data.devices import free_port
from tests.data.layouts import documents
from tests.data.preparing import (
    SMALL,
    assert_holds,
    finish,
    hashes,
    make,
    read_files,
    recipe_of,
    start,
    text_file_source,
    wait_for,
    write_texts,
    written,
)


@pytest.fixture(scope="module")
def small_corpus(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Several tasks and chunks in each of nine streams."""
    folder = tmp_path_factory.mktemp("small")
    some = list(documents(130, seed=8))[10:]
    by_folder = {"train": some[:100], "validation": some[100:110], "test": some[110:]}
    layouts.slimpajama(folder, by_folder, n_files=4)
    return recipe_of("SlimPajama", folder, {"task_bytes": 3_000, "chunk_bytes": 2_001}, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def made_by_one(small_corpus: Recipe, place: Path) -> dict[str, str]:
    make(place / "made by one", small_corpus)
    assert len(written(place / "made by one")) > 4
    return hashes(place / "made by one")


def test_workers_do_not_change_a_byte(small_corpus: Recipe, made_by_one: dict[str, str], tmp_path: Path) -> None:
    make(tmp_path / "out", small_corpus, workers=3)
    assert hashes(tmp_path / "out") == made_by_one


def test_processes_at_once_do_not_change_a_byte(
    small_corpus: Recipe, made_by_one: dict[str, str], tmp_path: Path
) -> None:
    processes = [start(lambda: make(tmp_path / "out", small_corpus, workers=2)) for _ in range(3)]
    assert [finish(process) for process in processes] == [0, 0, 0]
    assert hashes(tmp_path / "out") == made_by_one


def test_a_second_process_waits_for_the_first(
    small_corpus: Recipe, made_by_one: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".prepare.lock"):
        process = start(lambda: make(tmp_path / "out", small_corpus), tmp_path / "printed")
        waiting = "Another process is preparing"
        wait_for(lambda: (tmp_path / "printed").exists() and waiting in (tmp_path / "printed").read_text())
        assert hashes(tmp_path / "out") == {}
    assert finish(process) == 0
    assert hashes(tmp_path / "out") == made_by_one


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
    """Address of a Dask scheduler with two workers on this machine."""
    pytest.importorskip("distributed")
    (tmp_path / "killer.py").write_text(KILLER)
    address = f"tcp://127.0.0.1:{free_port()}"
    dask = [sys.executable, "-m", "dask"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": (tmp_path / "log").open("w"), "cwd": tmp_path}
    worker = [*dask, "worker", address, "--nthreads", "1", "--preload", "killer.py", "--no-dashboard"]
    commands = [
        [*dask, "scheduler", "--host", "127.0.0.1", "--port", address.rpartition(":")[2], "--no-dashboard"],
        worker,
        worker,
    ]
    with ExitStack() as stack:
        for command in commands:
            process = stack.enter_context(subprocess.Popen(command, env=os.environ, **quiet))
            stack.callback(process.terminate)
        yield address


def test_a_cluster_makes_the_same_folder_though_a_worker_is_killed(
    cluster: str, small_corpus: Recipe, made_by_one: dict[str, str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    make(tmp_path / "out", small_corpus, cluster=cluster)
    assert (tmp_path / "killed").exists()
    assert hashes(tmp_path / "out") == made_by_one
    layouts.openwebtext(tmp_path / "hub", ["a", "b"], n_files=1)[0].write_bytes(b"PAR1")
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "OpenWebText", "--source", "hub", "--tokenizer", "bpe", "--cluster", cluster]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "hub/plain_text/train-00000-of-00080.parquet, the file: it has no readable parquet footer" in said


def test_a_cluster_that_is_not_there(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "CONTACT_SECONDS", 0.5)
    for address in (f"tcp://127.0.0.1:{free_port()}", "nowhere"):
        with pytest.raises(UserError, match=f"No Dask scheduler answers at --cluster {address}: start one"):
            make(tmp_path / "out", recipe, cluster=address)


@pytest.mark.parametrize("task_bytes", [1000, 1 << 30])
def test_the_size_of_tasks_does_not_change_the_tokens(tokenizer: str, tmp_path: Path, task_bytes: int) -> None:
    some = list(documents(80, seed=9))[10:]
    pattern = text_file_source(tmp_path / "text", some, ".jsonl")
    sizes = SMALL | {"task_bytes": task_bytes}
    options = {"pattern": pattern, "text_field": "content", "tokenizer": tokenizer, "val_fraction": 0.2}
    make(tmp_path / "out", recipe_of("TextFiles", tmp_path / "text", sizes, **options))
    assert len(written(tmp_path / "out")) > 20 or task_bytes > 1000
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
    assert set(read_files(tmp_path / "out")) == set(names[:4])
    before = hashes(tmp_path / "out")
    next((tmp_path / "out" / "train").glob("chunk-*.bin")).unlink()
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
