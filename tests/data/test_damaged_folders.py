"""Damaged or foreign prepared folders are refused in a sentence. No name in them leads outside."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anlit.data.storage.manifest import checked_path
from anlit.data.storage.shards import check_chunks
from anlit.errors import UserError
from tests.data.modules import ready
from tests.data.reader import edit, read_json

Change = Callable[[Path], object]
COUNTS = {"documents": 1, "bytes": 1, "tokens": 1, "chunks": 1}
MANIFEST = "manifest.json"
INDEX = "train/index.json"
CHUNK = "train/chunk-0-0.bin"
NAMES_OUTSIDE = (
    "../out",
    "/etc/x",
    "a/../../out",
    "a\\b",
    "a\0b",
    "",
    ".",
    "a//b",
    "\x1b[2J",
    "\ud800",
    "a" * 256,
    3,
)
NAMES_INSIDE = ("a", "data/2024-01-01T00:00.parquet", "größe/..a", "a b")


@pytest.mark.parametrize("name", NAMES_OUTSIDE)
def test_a_name_that_leads_outside_its_folder_is_refused(name: Any) -> None:
    with pytest.raises(UserError, match=r"^The list names a file .*not inside its folder"):
        checked_path(name, "The list")


@pytest.mark.parametrize("name", NAMES_INSIDE)
def test_a_name_inside_its_folder_is_accepted(name: str) -> None:
    assert checked_path(name, "The list") == name


def test_a_name_that_is_too_deep_is_refused() -> None:
    with pytest.raises(UserError, match="not inside"):
        checked_path("a/b", "The list", max_depth=1)


def in_manifest(split: str = "", **changes: Any) -> Change:
    """Return a change of values in the manifest, or in a split of it."""

    def update(manifest: Any) -> None:
        (manifest[split] if split else manifest).update(changes)

    return lambda folder: edit(folder / MANIFEST, update)


def in_index(**changes: Any) -> Change:
    """Return a change of the first chunk in the index."""
    return lambda folder: edit(folder / INDEX, lambda index: index["chunks"][0].update(changes))


def writes(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text, encoding="latin-1")


def removes(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def resizes(name: str, size: int) -> Change:
    return lambda folder: os.truncate(folder / name, size)


def makes_pipe(name: str) -> Change:
    """Return a change of a file to a pipe, which would block a reader for ever."""

    def replace(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return replace


def claims_tokens(folder: Path) -> None:
    """Claim so many tokens that their order would not fit into memory."""
    in_index(dim=10**12)(folder)
    n_tokens = sum(chunk["dim"] for chunk in read_json(folder / INDEX)["chunks"])
    in_manifest("train", tokens=n_tokens)(folder)


BAD_MANIFEST = r"manifest\.json is damaged"
FOREIGN = r"manifest\.json was written by another version of anlit \(its format_version is"
BAD_INDEX = r"train(/index\.json)? is damaged \("
APART = r"is damaged \(manifest\.json and the chunks that each index\.json lists do not belong"
FOLDERS: list[tuple[Change, str]] = [
    (writes(MANIFEST, "{"), BAD_MANIFEST),
    (writes(MANIFEST, "[]"), BAD_MANIFEST),
    (writes(MANIFEST, "{}"), BAD_MANIFEST),
    (writes(MANIFEST, "\x00"), BAD_MANIFEST),
    (writes(MANIFEST, "\xff"), BAD_MANIFEST),
    (in_manifest(format_version=99), rf"{FOREIGN} 99, and this anlit reads 2\): update"),
    (in_manifest(format_version=1), rf"{FOREIGN} 1, and this anlit reads 2\): prepare the data in"),
    (in_manifest(format_version="2.1"), rf"{FOREIGN} '2\.1', and this anlit reads 2\): update"),
    (in_manifest(format_version=2.5), rf"{FOREIGN} 2\.5, and this anlit reads 2\): update"),
    (in_manifest(format_version=[3]), rf"{FOREIGN} \[3\], and this anlit reads 2\): update"),
    (in_manifest(format_version=None), rf"{BAD_MANIFEST} \(format_version is missing\)"),
    (writes(INDEX, "{"), BAD_INDEX),
    (writes(INDEX, "[]"), BAD_INDEX),
    (writes(INDEX, "{}"), BAD_INDEX),
    (writes(INDEX, '{"chunks": [{}]}'), BAD_INDEX),
    (writes(INDEX, '{"chunks": []}'), BAD_INDEX),
    (removes(INDEX), r"index\.json is damaged \(it is missing\)"),
    (removes(CHUNK), r"chunk-0-0\.bin is damaged \(it is missing\)"),
    (resizes(CHUNK, 1000), r"0-0\.bin is damaged \(it has 1,000 bytes .*prepare it again"),
    (in_manifest(content_sha256="../../../../out"), rf"{BAD_MANIFEST} \(content_sha256 is "),
    (in_manifest("train", subsets={"../../out": COUNTS}), rf"{BAD_MANIFEST} \(train names a file "),
    (in_manifest(splits=["train", "val", "../out"]), rf"{BAD_MANIFEST} \(.*splits is "),
    (in_manifest(dtype="object"), rf"{BAD_MANIFEST} \(dtype is 'object'"),
    (in_manifest("val", tokens="many"), rf"{BAD_MANIFEST} \(val\.tokens is str in place of int"),
    (in_manifest("val", bytes="many"), rf"{BAD_MANIFEST} \(bytes is str"),
    (in_manifest("val", text_sha256="b" * 63), rf"{BAD_MANIFEST} \(val\.text_sha256 is 'bbb"),
    (in_manifest(end_of_document=10**9), rf"{BAD_MANIFEST} \(end_of_document is 1000000000"),
    (in_index(filename="../../secret"), r"index\.json names a file '\.\./\.\./secret'"),
    (in_index(crc32=-1), APART),
    (claims_tokens, APART),
    (makes_pipe(MANIFEST), r"json is damaged \(it is not a file\)"),
    (makes_pipe(INDEX), r"json is damaged \(it is not a file\)"),
    (resizes(MANIFEST, 10**12), r"json is damaged \(it has more than 268,435,456 bytes\)"),
]


@pytest.mark.parametrize(("change", "message"), FOLDERS)
def test_a_damaged_folder_is_refused_in_one_sentence(
    change: Change, message: str, shards_copy: Path
) -> None:
    change(shards_copy)

    with pytest.raises(UserError, match=message):
        ready(str(shards_copy))


def test_a_folder_without_a_manifest_is_not_a_prepared_folder(tmp_path: Path) -> None:
    """A missing folder is in tests/integration/mistakes.py."""
    message = r"there is no .*/manifest\.json: set --data\.path to a prepared folder"

    with pytest.raises(UserError, match=message):
        ready(str(tmp_path))


def test_an_unfinished_preparation_has_to_be_continued(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()

    with pytest.raises(UserError, match=r"preparation of .* is not finished: repeat its command"):
        ready(str(tmp_path))


def test_one_device_of_each_machine_looks_at_the_chunks(shards_copy: Path) -> None:
    """The ninth device is the first of the second machine, whose copy lacks a chunk."""
    (shards_copy / CHUNK).unlink()

    ready(str(shards_copy), rank=9, ranks=16, local_rank=1)

    with pytest.raises(UserError, match=r"chunk-0-0\.bin is damaged \(it is missing\)"):
        ready(str(shards_copy), rank=8, ranks=16, local_rank=0)


def test_the_sizes_of_chunks_are_known_without_opening_them(shards_copy: Path, monkeypatch) -> None:
    """A file server answers one request per chunk, of which a corpus may have 100,000."""
    arrays = ready(str(shards_copy)).arrays_of_split("train")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("opened")

    for name in ("builtins.open", "io.open", "os.open"):
        monkeypatch.setattr(name, refuse)

    for array in arrays:
        check_chunks(array)
