"""Workers, a cluster, processes at once and the size of tasks: not a byte depends on them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
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
    SIZES,
    SMALL,
    assert_holds,
    by_split,
    finish,
    hashes,
    make,
    read_files,
    read_records,
    recipe_of,
    start,
    text_file_source,
    wait_for,
    written,
)


@pytest.fixture(scope="module")
def small_corpus(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Several tasks and chunks in each of nine streams."""
    folder, some = tmp_path_factory.mktemp("small"), list(documents(130, seed=8))[10:]
    layouts.slimpajama(folder, {"train": some[:100], "validation": some[100:110], "test": some[110:]}, n_files=4)
    return recipe_of("SlimPajama", folder, {"task_bytes": 3_000, "chunk_bytes": 2_001}, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def made_by_one(small_corpus: Recipe, place: Path) -> dict[str, str]:
    make(place / "made by one", small_corpus)
    assert len(written(place / "made by one")) > 4
    return hashes(place / "made by one")


@pytest.mark.parametrize(("n_processes", "workers"), [(1, 3), (3, 2)])
def test_workers_and_processes_at_once_do_not_change_a_byte(
    n_processes: int, workers: int, small_corpus: Recipe, made_by_one: dict[str, str], tmp_path: Path
) -> None:
    processes = [start(lambda: make(tmp_path / "out", small_corpus, workers)) for _ in range(n_processes)]
    assert [finish(process) for process in processes] == [0] * n_processes
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


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:{}", "nowhere"])
def test_a_cluster_that_is_not_there(
    address: str, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "CONTACT_SECONDS", 0.5)
    address = address.format(free_port())
    with pytest.raises(UserError, match=f"No Dask scheduler answers at --cluster {address}: start one"):
        make(tmp_path / "out", recipe, cluster=address)


@pytest.mark.parametrize("task_bytes", [1000, 1 << 30])
def test_the_size_of_tasks_does_not_change_the_tokens(tokenizer: str, tmp_path: Path, task_bytes: int) -> None:
    some = list(documents(80, seed=9))[10:]
    options = {"text_field": "content", "tokenizer": tokenizer, "val_fraction": 0.2}
    options["pattern"] = text_file_source(tmp_path / "text", some)
    make(tmp_path / "out", recipe_of("TextFiles", tmp_path / "text", SMALL | {"task_bytes": task_bytes}, **options))
    assert len(written(tmp_path / "out")) > 20 or task_bytes > 1000
    assert_holds(tmp_path / "out", by_split(some, 0.2))


def test_a_large_file_is_shared_by_workers(tokenizer: str, tmp_path: Path) -> None:
    """One of JSON lines: its parts are tasks of their own."""
    lines = [json.dumps({"text": f"text {number}"}) + "\n" for number in range(3000)]
    file = layouts.write(tmp_path / "text" / "a.jsonl", "".join(lines).encode())
    recipe = recipe_of("TextFiles", tmp_path / "text", SIZES, pattern="*.jsonl", tokenizer=tokenizer, val_fraction=0.1)
    manifest = make(tmp_path / "out", recipe, workers=2)
    assert (manifest["files"], manifest["tasks"]) == (1, file.stat().st_size // 6000)
    sizes = [record["files"][0]["documents"] for record in read_records(tmp_path / "out")]
    assert sum(sizes) == 3000
    assert max(sizes) < 1.3 * min(sizes)


def test_names_of_all_kinds(tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Separators, letters beyond ASCII, bytes that are not UTF-8 in names; other names of the source are the same."""
    names = ["a\u2028b.txt", "c\x85d.txt", "größe.txt", "new\nline.txt", "\udcff.txt", "latin\udce4.txt"]
    for name in names:
        layouts.write(tmp_path / "text" / name, name.encode("utf-8", "surrogateescape"))
    monkeypatch.chdir(tmp_path / "text")
    recipes = [recipe_of("TextFiles", Path(name), tokenizer=tokenizer, val_fraction=0.5) for name in ("../text", ".")]
    manifest, again = (make(tmp_path / "out", recipe) for recipe in recipes)
    assert manifest == again
    assert manifest["documents"] == 4
    assert sorted(manifest["skipped"]["not_utf8"]["listed"]) == sorted(names[4:])
    assert set(read_files(tmp_path / "out")) == set(names[:4])
