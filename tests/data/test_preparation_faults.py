"""Whatever is wrong with source files, disk, processes or folder: one sentence, and nothing that is done is lost."""

import errno
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anlit.cli import main
from anlit.data.preparation import run as run_module
from anlit.data.preparation.encode import Job, encode_task
from anlit.data.preparation.plan import Task
from anlit.data.preparation.recipe import Recipe
from anlit.data.preparation.workspace import Workspace
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import SET_NAMES, documents
from tests.data.preparing import (
    assert_holds,
    finish,
    hashes,
    make,
    members,
    read_json,
    read_sources,
    read_texts,
    recipe_of,
    scratch,
    start,
    start_command,
    train_tokenizer,
    wait_for,
)

SIZES = {"task_bytes": 6_000, "group_bytes": 12_000, "chunk_bytes": 10_001}
FIFTY_MB = 50_000_000


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with scratch() as folder:
        yield folder


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with scratch() as folder:
        yield folder


@pytest.fixture(scope="module")
def tokenizer(place: Path) -> str:
    return str(train_tokenizer(place / "tokenizer.json"))


@pytest.fixture(scope="module")
def recipe(place: Path, tokenizer: str) -> Recipe:
    """Several groups of several tasks."""
    layouts.openwebtext(place / "hub", list(documents(60, seed=1))[10:], n_files=4, row_group_size=4)
    return recipe_of("OpenWebText", place / "hub", SIZES, tokenizer=tokenizer, val_documents=9)


@pytest.fixture(scope="module")
def finished(place: Path, recipe: Recipe) -> Path:
    make(place / "finished", recipe)
    assert len(read_sources(place / "finished")) > 2
    return place / "finished"


def jsonl_line(text: object, name: str = SET_NAMES[1]) -> bytes:
    return json.dumps({"text": text, "meta": {"redpajama_set_name": name}}).encode() + b"\n"


def write_slimpajama(hub: Path, lines: list[bytes]) -> Path:
    """One validation document and one training file of these lines."""
    for name, content in (("validation/chunk1/a.jsonl", [jsonl_line("val")]), ("train/chunk1/a.jsonl", lines)):
        path = hub / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(content))
    return hub / "train/chunk1/a.jsonl"


BAD_LINES = {
    "not_utf8": b'{"text": "gr\xf6\xdfe", "meta": {"redpajama_set_name": "RedPajamaC4"}}\n',
    "not_json": b'{"text": "no end\n',
    "no_text_field": b'{"content": "x", "meta": {"redpajama_set_name": "RedPajamaC4"}}\n',
    "no_subset_field": b'{"text": "x", "meta": {}}\n',
    "empty": jsonl_line(""),
    "too_long": jsonl_line("x" * FIFTY_MB),
}
SAYS = {
    "not_utf8": "is not valid UTF-8",
    "not_json": "the line is not JSON",
    "no_text_field": 'the field "text" is missing or null and not a string',
    "no_subset_field": 'the field "meta.redpajama_set_name" is missing or null',
    "empty": "its text is empty",
    "too_long": "its text has 50,000,000 bytes, more than --max-document-bytes 33554432",
}


def prepare_command(corpus: str, *options: str) -> int:
    return main(["prepare", corpus, "--source", "../hub", "--output", "out", "--workers", "1", *options])


def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are to be compared, and their manifests have the command in them: so it must be the same."""
    folder.mkdir()
    monkeypatch.chdir(folder)


def assert_sentence(printed: str, *parts: str) -> None:
    """The last line is one sentence with these parts, and there is no traceback."""
    *before, last = printed.strip().splitlines()
    assert last.startswith("anlit: error: ")
    assert last.endswith(".")
    for part in parts:
        assert part in last
    assert not [line for line in before if "rror" in line or "Traceback" in line]


@pytest.mark.parametrize("problem", list(BAD_LINES))
def test_a_bad_line_stops_or_is_skipped(
    problem: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [f"document {number}" for number in range(6)]
    lines = [jsonl_line(text) for text in good]
    write_slimpajama(tmp_path / "hub", [*lines[:3], BAD_LINES[problem], *lines[3:]])
    in_folder(tmp_path / "stopped", monkeypatch)
    assert prepare_command("SlimPajama", "--tokenizer", tokenizer) == 2
    assert_sentence(capsys.readouterr().err, "../hub/train/chunk1/a.jsonl, line 4: ", SAYS[problem], "--on-bad skip")
    assert not Path("out/manifest.json").exists()
    assert prepare_command("SlimPajama", "--tokenizer", tokenizer, "--on-bad", "skip") == 0
    assert "7 documents, 1 skipped" in capsys.readouterr().err
    manifest = read_json(Path("out/manifest.json"))
    place = "train/chunk1/a.jsonl, line 4"
    assert manifest["skipped"] == {problem: {"count": 1, "listed": [place]}}
    (file,) = [file for group in read_sources(Path("out")) for file in group["files"] if "train" in file["name"]]
    assert (file["documents"], file["skipped"]) == (6, {problem: 1})
    ((where, reason, detail),) = file["skipped_list"]
    assert (where, reason) == ("line 4", problem)
    assert SAYS[problem] in detail
    assert_holds(Path("out"), {"train/RedPajamaC4": good, "val/RedPajamaC4": ["val"]})
    in_folder(tmp_path / "skipped at once", monkeypatch)
    assert prepare_command("SlimPajama", "--tokenizer", tokenizer, "--on-bad", "skip") == 0
    assert hashes(tmp_path / "skipped at once" / "out") == hashes(tmp_path / "stopped" / "out")


def test_a_truncated_zst(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some = list(documents(90, seed=3))[10:]
    hub = tmp_path / "hub"
    files = layouts.slimpajama(hub, {"train": some, "validation": ["val"]}, n_files=2)
    files[1].write_bytes(files[1].read_bytes()[:-100])  # in its third frame
    in_folder(tmp_path / "stopped", monkeypatch)
    assert prepare_command("SlimPajama", "--tokenizer", tokenizer) == 2
    said = [
        "train/chunk2/example_train_0.jsonl.zst, line ",
        "ends in the middle of its compressed data",
        "--on-bad skip",
    ]
    assert_sentence(capsys.readouterr().err, *said)
    assert prepare_command("SlimPajama", "--tokenizer", tokenizer, "--on-bad", "skip") == 0
    skipped = read_json(Path("out/manifest.json"))["skipped"]
    assert list(skipped) == ["truncated"]
    kept = sum(len(read_texts(Path("out"), f"train/{name.name}")) for name in Path("out/train").iterdir())
    assert 40 < kept < len(some)
    assert skipped["truncated"]["listed"] == [f"train/chunk2/example_train_0.jsonl.zst, line {kept - 40 + 1}"]
    expected: dict[str, list[str]] = {"val/RedPajamaCommonCrawl": ["val"]}
    for number, text in enumerate(some[:kept]):
        expected.setdefault(f"train/{SET_NAMES[number % 7]}", []).append(text)
    assert_holds(Path("out"), expected)


@pytest.mark.parametrize("corpus", ["OpenWebText", "FineWeb"])
def test_a_broken_row_group(
    corpus: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some = list(documents(70, seed=3))[10:]
    write = layouts.openwebtext if corpus == "OpenWebText" else layouts.fineweb
    files = write(tmp_path / "hub", some, n_files=2)
    column = pq.ParquetFile(files[1]).metadata.row_group(1).column(0)
    content = bytearray(files[1].read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    content[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    files[1].write_bytes(content)
    options = ["--tokenizer", tokenizer, "--val-documents", "3", "--val-tokens", "500"]
    in_folder(tmp_path / "stopped", monkeypatch)
    assert prepare_command(corpus, *options) == 2
    name = files[1].relative_to(tmp_path / "hub").as_posix()
    said = [f"../hub/{name}, row group 2: it is damaged", "10 of its 10 rows are lost, from row 11", "--on-bad skip"]
    assert_sentence(capsys.readouterr().err, *said)
    assert prepare_command(corpus, *options, "--on-bad", "skip") == 0
    manifest = read_json(Path("out/manifest.json"))
    assert manifest["skipped"] == {"damaged": {"count": 1, "listed": [f"{name}, row group 2"]}}
    kept = some[:40] + some[50:]
    val = read_texts(Path("out"), "val")
    assert val == [text for text in kept if text in val]
    assert_holds(Path("out"), {"val": val, "train": [text for text in kept if text not in val]})


@pytest.mark.parametrize("content", [b"", b"PAR1 and nothing more", b"text that is no parquet" * 100])
def test_a_file_that_is_no_parquet(content: bytes, tokenizer: str, tmp_path: Path) -> None:
    files = layouts.openwebtext(tmp_path / "hub", list("abcdef"), n_files=2)
    files[1].write_bytes(content)
    recipe = recipe_of("OpenWebText", tmp_path / "hub", SIZES, tokenizer=tokenizer, val_documents=1)
    with pytest.raises(UserError, match=r"train-00001-of-00080\.parquet, the file: it has no readable parquet footer"):
        make(tmp_path / "out", recipe)
    manifest = make(tmp_path / "out", recipe, skip_bad=True)
    assert manifest is not None
    assert manifest["documents"] == 3
    assert manifest["skipped"]["damaged"]["listed"] == ["plain_text/train-00001-of-00080.parquet, the file"]


def test_empty_documents_in_parquet(tokenizer: str, tmp_path: Path) -> None:
    texts = ["a", "", "b", "c", ""]
    layouts.openwebtext(tmp_path / "hub", texts, n_files=1)
    recipe = recipe_of("OpenWebText", tmp_path / "hub", SIZES, tokenizer=tokenizer, val_documents=1)
    with pytest.raises(UserError, match=r"parquet, row 2: its text is empty"):
        make(tmp_path / "out", recipe)
    manifest = make(tmp_path / "out", recipe, skip_bad=True)
    assert manifest is not None
    places = [f"plain_text/train-00000-of-00080.parquet, row {row}" for row in (2, 5)]
    assert manifest["skipped"] == {"empty": {"count": 2, "listed": places}}


def test_a_column_that_is_missing(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    pq.write_table(pa.table({"content": ["a", "b"]}), tmp_path / "hub" / "a.parquet")
    recipe = recipe_of("OpenWebText", tmp_path / "hub", SIZES, tokenizer=tokenizer, val_documents=1)
    with pytest.raises(UserError, match=r'a\.parquet, the file: there is no column "text" \(its columns: content\)'):
        make(tmp_path / "out", recipe)


def test_a_document_of_just_the_longest_size(tokenizer: str, tmp_path: Path) -> None:
    texts = ["ab" * 500, "é" * 500, "c" * 1001]  # 1,000 bytes, 1,000 bytes, 1,001 bytes
    layouts.openwebtext(tmp_path / "hub", ["val", *texts], n_files=1)
    options = {"tokenizer": tokenizer, "val_documents": 1, "max_document_bytes": 1000}
    manifest = make(tmp_path / "out", recipe_of("OpenWebText", tmp_path / "hub", SIZES, **options), skip_bad=True)
    assert manifest is not None
    assert manifest["skipped"]["too_long"]["listed"] == ["plain_text/train-00000-of-00080.parquet, row 4"]
    assert manifest["documents"] == 3


@pytest.mark.slow
def test_a_document_of_50_megabytes_where_it_is_allowed(tokenizer: str, tmp_path: Path) -> None:
    text = "a document without end, " * (FIFTY_MB // 24)
    write_slimpajama(tmp_path / "hub", [jsonl_line("short"), jsonl_line(text), jsonl_line("short too")])
    recipe = recipe_of("SlimPajama", tmp_path / "hub", SIZES, tokenizer=tokenizer, max_document_bytes=FIFTY_MB)
    make(tmp_path / "out", recipe)
    assert read_texts(tmp_path / "out", "train/RedPajamaC4") == ["short", text, "short too"]


def test_only_the_first_thousand_places_are_listed(tokenizer: str, tmp_path: Path) -> None:
    write_slimpajama(tmp_path / "hub", [jsonl_line("good"), *[BAD_LINES["empty"]] * 3000])
    sizes = SIZES | {"task_bytes": 1_000_000}
    manifest = make(tmp_path / "out", recipe_of("SlimPajama", tmp_path / "hub", sizes, tokenizer=tokenizer), 1,
                    skip_bad=True)  # fmt: skip
    assert manifest is not None
    assert manifest["skipped"]["empty"]["count"] == 3000
    listed = manifest["skipped"]["empty"]["listed"]
    assert len(listed) == 1000
    assert listed[:2] == ["train/chunk1/a.jsonl, line 2", "train/chunk1/a.jsonl, line 3"]
    (file,) = [file for group in read_sources(tmp_path / "out") for file in group["files"] if "train" in file["name"]]
    assert (file["skipped"], len(file["skipped_list"])) == ({"empty": 3000}, 1000)  # of one task


def counted(patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Group and number of each task that is encoded in this process from now on."""
    done: list[tuple[int, int]] = []
    patch.setattr(run_module, "encode_task", lambda job, task: (done.append((task.group, task.number)),
                                                                encode_task(job, task))[1])  # fmt: skip
    return done


def test_what_was_done_before_a_bad_document_is_kept(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [jsonl_line(text) for text in list(documents(60, seed=3))[10:]]
    write_slimpajama(tmp_path / "hub", [*lines[:30], BAD_LINES["not_json"], *lines[30:]])
    recipe = recipe_of("SlimPajama", tmp_path / "hub", SIZES, tokenizer=tokenizer)
    first = counted(monkeypatch)
    with pytest.raises(UserError, match=r"a\.jsonl, line 31: the line is not JSON"):
        make(tmp_path / "out", recipe)
    assert len(first) > 2
    again = counted(monkeypatch)
    make(tmp_path / "out", recipe, skip_bad=True)
    assert again[0] == first[-1]  # the one that failed
    assert set(first[:-1]).isdisjoint(again)
    make(tmp_path / "at once", recipe, skip_bad=True)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "at once")


def failing(number: int, error: Callable[[], BaseException]) -> Callable[[int], None]:
    """An os.fsync that fails at call `number` and later, as a disk does that is full."""
    calls = iter(range(1, 1_000_000))

    def fsync(descriptor: int) -> None:
        if next(calls) >= number:
            raise error()

    return fsync


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
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


def test_a_disk_that_is_really_full(recipe: Recipe, finished: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not permitted")
    try:
        with pytest.raises(UserError, match=r"The disk of .*out is full: free some space; what is done .* is kept"):
            make(disk / "out", recipe, workers=2)
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        make(disk / "out", recipe, workers=2)
        assert hashes(disk / "out") == hashes(finished)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_another_fault_of_the_system(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.EIO, "Input/output error", "/disk/file")
    monkeypatch.setattr(os, "fsync", failing(5, lambda: error))
    with pytest.raises(UserError, match=r"/disk/file: Input/output error; what is done so far is kept, repeat"):
        make(tmp_path / "out", recipe)


def interrupted(folder: Path, recipe: Recipe, tasks: int = 3) -> None:
    """Begin a preparation and leave it in the middle of its first group or of a later one."""

    def encode(job: Any, task: Any, left: Iterator[int] = iter(range(tasks))) -> dict[str, Any]:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return encode_task(job, task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "encode_task", encode)
        with pytest.raises(KeyboardInterrupt):
            make(folder, recipe)
    assert (folder / ".work" / "plan.json").is_file()


@pytest.fixture
def own_hub(recipe: Recipe, place: Path, tmp_path: Path, tokenizer: str) -> Recipe:
    """The same corpus in a place where it can be changed."""
    shutil.copytree(place / "hub", tmp_path / "hub")
    return recipe_of("OpenWebText", tmp_path / "hub", SIZES, tokenizer=tokenizer, val_documents=9)


def test_a_source_file_that_changes_meanwhile(own_hub: Recipe, finished: Path, tmp_path: Path) -> None:
    """Even if it keeps its length."""
    interrupted(tmp_path / "out", own_hub, tasks=1)
    file = tmp_path / "hub" / "plain_text" / "train-00000-of-00080.parquet"
    before = file.read_bytes()
    file.write_bytes(before.replace(b"document", b"DOCUMENT").replace(b"a", b"b"))
    with pytest.raises(UserError, match=r"train-00000-of-00080\.parquet is not what .*out was begun with: put the old"):
        make(tmp_path / "out", own_hub)
    file.write_bytes(before)
    make(tmp_path / "out", own_hub)
    assert hashes(tmp_path / "out") == hashes(finished)


def test_a_source_file_of_another_length(own_hub: Recipe, finished: Path, tmp_path: Path) -> None:
    interrupted(tmp_path / "out", own_hub)
    file = tmp_path / "hub" / "plain_text" / "train-00003-of-00080.parquet"
    before = file.read_bytes()
    for change in (lambda: file.write_bytes(before + b"x"), file.unlink):
        change()
        with pytest.raises(UserError, match=r"out was begun with other settings or files \(names or sizes of the s"):
            make(tmp_path / "out", own_hub)
    file.write_bytes(before)
    make(tmp_path / "out", own_hub)
    assert hashes(tmp_path / "out") == hashes(finished)


def test_a_source_that_is_gone(own_hub: Recipe, finished: Path, tmp_path: Path) -> None:
    interrupted(tmp_path / "out", own_hub)
    (tmp_path / "hub").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"parquet: No such file or directory; what is done so far is kept, repeat"):
        make(tmp_path / "out", own_hub)
    (tmp_path / "elsewhere").rename(tmp_path / "hub")
    make(tmp_path / "out", own_hub)
    assert hashes(tmp_path / "out") == hashes(finished)


def test_a_text_file_that_changes_meanwhile(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number, text in enumerate(list(documents(60, seed=3))[10:]):
        (tmp_path / "text" / f"{number}.txt").write_bytes(text.encode())
    recipe = recipe_of("TextFiles", tmp_path / "text", SIZES, tokenizer=tokenizer)
    interrupted(tmp_path / "out", recipe)
    file = max((tmp_path / "text").iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(UserError, match=r"\.txt has changed since the preparation began"):
        make(tmp_path / "out", recipe_of("TextFiles", tmp_path / "text", SIZES, tokenizer=tokenizer))


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        ({"val_documents": 8}, r"splits \{.*'documents': 9.*\} → \{.*'documents': 8"),
        ({"seed": 1}, r"'seed': 42.* → .*'seed': 1"),
        ({"text": "content"}, "text text → content"),
        ({"tokenizer": "bpe"}, "vocab_size None → 4096"),
        ({"max_document_bytes": 10}, "max_document_bytes 33554432 → 10"),
        ({"end_of_document": "<eos>"}, r"end_of_document <\|endoftext\|> → <eos>"),
    ],
)
def test_other_settings_are_refused(
    options: dict[str, Any], differs: str, recipe: Recipe, finished: Path, place: Path, tokenizer: str, tmp_path: Path
) -> None:
    other = recipe_of("OpenWebText", place / "hub", SIZES, **{"tokenizer": tokenizer, "val_documents": 9, **options})
    before = hashes(finished)
    with pytest.raises(UserError, match=f"finished was prepared with other settings or files .*{differs}.*: remove"):
        make(finished, other)
    assert hashes(finished) == before
    interrupted(tmp_path / "out", recipe)
    before = hashes(tmp_path / "out")
    with pytest.raises(UserError, match=f"out was begun with other settings or files .*{differs}.*: remove"):
        make(tmp_path / "out", other)
    assert hashes(tmp_path / "out") == before
    make(tmp_path / "out", recipe)
    assert hashes(tmp_path / "out") == hashes(finished)


def test_another_corpus_and_another_tokenizer_file_are_refused(
    finished: Path, recipe: Recipe, place: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="corpus OpenWebText → FineWeb"):
        make(finished, recipe_of("FineWeb", place / "hub", SIZES, tokenizer=recipe.tokenizer))
    other = str(train_tokenizer(tmp_path / "other.json", 300))
    with pytest.raises(UserError, match=r"tokenizer sha256:\w+ → sha256:\w+"):
        make(finished, recipe_of("OpenWebText", place / "hub", SIZES, tokenizer=other, val_documents=9))
    moved = shutil.copy(recipe.tokenizer, tmp_path / "moved.json")  # the same file elsewhere is the same
    make(finished, recipe_of("OpenWebText", place / "hub", SIZES, tokenizer=str(moved), val_documents=9))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: path.write_bytes(b""),
    "flipped": flip,
}


@pytest.mark.parametrize("kind", list(DAMAGE))
def test_a_damaged_chunk_is_made_again(
    kind: str, recipe: Recipe, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shutil.copytree(finished, tmp_path / "out")
    DAMAGE[kind](tmp_path / "out" / "train" / "chunk-000001-0000.bin")
    tasks = counted(monkeypatch)
    if kind == "flipped":  # only those who ask for it pay for reading everything
        make(tmp_path / "out", recipe)
        assert hashes(tmp_path / "out") != hashes(finished)
        assert tasks == []
    make(tmp_path / "out", recipe, verify=kind == "flipped")
    assert {group for group, _ in tasks} == {1}
    assert hashes(tmp_path / "out") == hashes(finished)
    assert "train/chunk-000001-0000.bin is missing or damaged" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tokenizer.json", "train/index.json"])
@pytest.mark.parametrize("kind", ["missing", "short", "flipped"])
def test_other_damaged_files_are_made_again(
    kind: str, name: str, recipe: Recipe, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, tmp_path / "out")
    DAMAGE[kind](tmp_path / "out" / name)
    tasks = counted(monkeypatch)
    make(tmp_path / "out", recipe)
    assert tasks == []
    assert hashes(tmp_path / "out") == hashes(finished)


def test_what_a_killed_process_left_is_not_taken_for_what_is_missing_now(
    recipe: Recipe, finished: Path, tmp_path: Path
) -> None:
    """Killed when all but cleaning up was done: there are records of groups whose chunks are lost later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "remove", lambda self: None)
        make(tmp_path / "out", recipe)
    assert (tmp_path / "out" / ".work" / "groups" / "000001.json").is_file()
    (tmp_path / "out" / "train" / "chunk-000001-0000.bin").unlink()
    make(tmp_path / "out", recipe)
    assert hashes(tmp_path / "out") == hashes(finished)


def test_a_lost_tokenizer_that_was_trained_is_trained_again(place: Path, tmp_path: Path) -> None:
    recipe = recipe_of("OpenWebText", place / "hub", SIZES, tokenizer="bpe", vocab_size=300, val_documents=9)
    make(tmp_path / "out", recipe)
    before = hashes(tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").unlink()
    make(tmp_path / "out", recipe)
    assert hashes(tmp_path / "out") == before


def test_a_damaged_folder_whose_sources_have_changed(own_hub: Recipe, tmp_path: Path) -> None:
    """Other documents would take the places of those that the other splits, chunks and the manifest know."""
    make(tmp_path / "out", own_hub)
    before = hashes(tmp_path / "out")
    file = tmp_path / "hub" / "plain_text" / "train-00000-of-00080.parquet"
    content = file.read_bytes()
    (tmp_path / "out" / "val" / "chunk-000000-0000.bin").unlink()
    file.write_bytes(content.replace(b"a", b"b"))
    with pytest.raises(UserError, match=r"train-00000-of-00080\.parquet is not what .*out was begun with"):
        make(tmp_path / "out", own_hub)
    file.write_bytes(content)
    make(tmp_path / "out", own_hub)
    assert hashes(tmp_path / "out") == before


def test_a_damaged_folder_whose_sources_are_gone(own_hub: Recipe, tmp_path: Path) -> None:
    make(tmp_path / "out", own_hub)
    shutil.rmtree(tmp_path / "hub")
    before = hashes(tmp_path / "out")
    make(tmp_path / "out", own_hub)  # it needs none while it is whole
    chunk = tmp_path / "out" / "train" / "chunk-000001-0000.bin"
    content = chunk.read_bytes()
    chunk.unlink()
    with pytest.raises(UserError, match=r"There is no folder .*hub: set --source"):
        make(tmp_path / "out", own_hub)
    chunk.write_bytes(content)
    assert hashes(tmp_path / "out") == before
    make(tmp_path / "out", own_hub)


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text("{"), lambda path: path.write_text("")])
def test_a_folder_that_does_not_know_what_it_is_made_of(
    change: Callable[[Path], Any], recipe: Recipe, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "out")
    change(tmp_path / "out" / "sources.jsonl")
    with pytest.raises(UserError, match=r"sources\.jsonl is missing or damaged: copy the folder again, or remove it"):
        make(tmp_path / "out", recipe)


def test_what_is_something_else_is_not_touched(recipe: Recipe, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "precious.bin").write_text("precious")
    before = hashes(folder)
    with pytest.raises(UserError, match=r"mine is not a prepared folder, it has no manifest\.json but train: choose"):
        make(folder, recipe)
    (folder / "manifest.json").write_text('{"name": "of something else"}')
    with pytest.raises(UserError, match=r"mine/manifest\.json is damaged \(without format_version"):
        make(folder, recipe)
    (folder / "manifest.json").write_text('{"format_version": 1}')
    with pytest.raises(UserError, match="has shards of format 1 and this version reads 2: remove the folder"):
        make(folder, recipe)
    (folder / "manifest.json").unlink()
    assert hashes(folder) == before
    assert sorted(path.name for path in folder.iterdir()) == ["train"]
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match="file is a file: choose a folder with --output"):
        make(tmp_path / "file", recipe)
    assert (tmp_path / "file").read_text() == "precious"


def test_a_place_that_cannot_be_written_to(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/data/out")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match="/data/out: Permission denied"):
        make(tmp_path / "out", recipe)


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


def encode_slowly(job: Job, task: Task) -> dict[str, Any]:
    """Also tells that it has come so far."""
    if task.group == 1:
        (job.workspace.target.parent / "reached").touch()
        time.sleep(0.5)
    return encode_task(job, task)


@pytest.mark.parametrize("workers", [1, 2])
def test_control_c(
    recipe: Recipe, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """A terminal sends SIGINT to the command and to its workers alike."""
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "encode_task", encode_slowly)
        patch.setattr("anlit.data.preparation.command.CORPORA", {"OpenWebText": lambda options: recipe})
        arguments = ["prepare", "OpenWebText", "--output", str(tmp_path / "out"), "--workers", str(workers)]
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
    if workers > 1:  # what they had begun has come to its end
        assert [*work.glob("tasks/000001-[0-9]*.json"), *work.glob("groups/000001.json")]
    make(tmp_path / "out", recipe, workers)
    assert hashes(tmp_path / "out") == hashes(finished)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokenizer": "nosuch.json"}, r"There is no tokenizer at nosuch\.json"),
        ({"tokenizer": "none"}, "--tokenizer none is for files that hold tokens already"),
        ({"tokenizer": "bpe", "vocab_size": 100}, "vocab_size 100 leaves no room"),
        ({"end_of_document": "<eos>"}, 'has no token "<eos>"'),
        ({"val_documents": 1000}, "1,000 are to be held out for validation: set --val-documents"),
    ],
)
def test_a_wrong_option_does_not_stand_in_the_way_of_the_right_one(
    options: dict[str, Any], says: str, recipe: Recipe, finished: Path, place: Path, tokenizer: str, tmp_path: Path
) -> None:
    wrong = recipe_of("OpenWebText", place / "hub", SIZES, **{"tokenizer": tokenizer, "val_documents": 9, **options})
    with pytest.raises(UserError, match=says):
        make(tmp_path / "out", wrong)
    make(tmp_path / "out", recipe)
    assert hashes(tmp_path / "out") == hashes(finished)


def test_a_folder_can_be_made_anew_in_the_same_place(recipe: Recipe, place: Path, tmp_path: Path) -> None:
    """Nothing of an earlier one is remembered in the process, such as its tokenizer."""
    other = recipe_of("OpenWebText", place / "hub", SIZES, tokenizer="bpe", vocab_size=300, val_documents=9)
    make(tmp_path / "alone", other)
    make(tmp_path / "out", recipe)
    shutil.rmtree(tmp_path / "out")
    make(tmp_path / "out", other)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "alone")
