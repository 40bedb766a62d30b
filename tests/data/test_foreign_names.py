"""Prepared folders and listings by someone else: no name in them leads out of its folder, none is written there."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anlit.data.module import TokenShards
from anlit.data.preparation.recipe import Recipe
from anlit.data.storage.names import checked_name, checked_path, checked_sha256, path_inside
from anlit.errors import UserError
from tests.data.preparing import hashes, make

WRONG = [
    *("../out", "/etc/passwd", "a/../../out", "a\\b", "a\0b", "", ".", "..", "C:x", "a//b"),
    *("a\nb", "\x1b[2J", "\ud800", "a" * 256, None, 3, ["a"]),
]


@pytest.mark.parametrize("name", WRONG)
def test_names_that_lead_elsewhere(name: Any) -> None:
    with pytest.raises(UserError, match=r"^The list names a file .*not inside its folder"):
        checked_path(name, "The list")


def test_names_that_stay_inside() -> None:
    for name in ("a", "data/2024-01-01T00:00.parquet", "größe/..a", "a b"):
        assert checked_path(name, "The list") == name
    assert checked_name("chunk-0.bin", "The list") == "chunk-0.bin"
    for name in ("a/b", "..", "/"):
        with pytest.raises(UserError, match="not inside"):
            checked_name(name, "The list")
    for text in ("../../x", "a" * 63, "A" * 64, "a" * 64 + "\n", None):
        with pytest.raises(UserError, match="where a SHA-256 belongs"):
            checked_sha256(text, "The list")


def test_a_link_on_the_way(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "link").symlink_to(tmp_path)
    assert path_inside(tmp_path / "inside", "a/b") == tmp_path / "inside" / "a" / "b"
    with pytest.raises(UserError, match="by a symbolic link: remove that link"):
        path_inside(tmp_path / "inside", "link/b")


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def rename_chunk(index: dict[str, Any]) -> None:
    index["chunks"][0]["filename"] = "../../secret"


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a hash that is a path": lambda manifest: manifest.update(content_sha256="../../../../out"),
    "a subset that is a path": lambda manifest: manifest["train"].update(subsets={"../../out": manifest["val"]}),
    "a split that is a path": lambda manifest: manifest.update(splits=["train", "val", "../out"]),
    "a type that is none": lambda manifest: manifest.update(dtype="object"),
    "no number of tokens": lambda manifest: manifest["val"].update(tokens="many"),
    "no number of bytes": lambda manifest: manifest["val"].update(bytes="many"),
    "a separator out of the vocabulary": lambda manifest: manifest.update(end_of_document=10**9),
}


@pytest.mark.parametrize("kind", list(MANIFESTS))
def test_a_manifest_that_leads_elsewhere(kind: str, own_shards: Path) -> None:
    edit(own_shards / "manifest.json", MANIFESTS[kind])
    with pytest.raises(UserError, match=r"manifest\.json "):
        TokenShards(str(own_shards), context_length=64).setup()


def test_an_index_that_leads_elsewhere(own_shards: Path, tmp_path: Path) -> None:
    shutil.copy(own_shards / "train" / "chunk-0-0.bin", tmp_path / "secret")
    edit(own_shards / "train" / "index.json", rename_chunk)
    with pytest.raises(UserError, match=r"index\.json names a file '\.\./\.\./secret'"):
        TokenShards(str(own_shards), context_length=64).setup()


def test_an_index_that_claims_more_tokens_than_its_bytes_hold(own_shards: Path) -> None:
    """The order of 10¹² tokens does not fit into memory."""
    edit(own_shards / "train" / "index.json", lambda index: index["chunks"][0].update(dim=10**12))
    n_tokens = sum(chunk["dim"] for chunk in json.loads((own_shards / "train" / "index.json").read_text())["chunks"])
    edit(own_shards / "manifest.json", lambda manifest: manifest["train"].update(tokens=n_tokens))
    with pytest.raises(UserError, match=r"says [\d,]+ bytes and tokens that take 2,000,000,000,012\)"):
        TokenShards(str(own_shards), context_length=64).setup()


@pytest.mark.parametrize("name", ["manifest.json", "train/index.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name: str, own_shards: Path) -> None:
    (own_shards / name).unlink()
    os.mkfifo(own_shards / name)
    with pytest.raises(UserError, match=r"json is damaged \(it is no file\)"):
        TokenShards(str(own_shards), context_length=64).setup()


def move_stream(group: dict[str, Any]) -> None:
    group["streams"]["../../out"] = group["streams"].pop("train")


def move_chunk(group: dict[str, Any]) -> None:
    group["streams"]["train"]["chunks"][0]["filename"] = "../../out"


@pytest.mark.parametrize("change", [move_stream, move_chunk])
def test_sources_that_lead_elsewhere_are_not_mended(
    change: Callable[[dict[str, Any]], None], recipe: Recipe, tmp_path: Path
) -> None:
    """A lost chunk makes `prepare` write what sources.jsonl names."""
    folder = tmp_path / "a" / "out"
    make(folder, recipe)
    groups = [json.loads(line) for line in (folder / "sources.jsonl").read_text().splitlines()]
    change(groups[0])
    (folder / "sources.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))
    next((folder / "train").glob("chunk-000001*")).unlink()
    before = hashes(tmp_path)
    with pytest.raises(UserError, match=r"sources\.jsonl names a file '\.\./\.\./out'"):
        make(folder, recipe)
    assert hashes(tmp_path) == before


@pytest.mark.parametrize(
    "command",
    [
        "curl https://example.org/x | sh",
        "anlit prepare Test; rm -rf ~",
        "anlit prepare Test $(reboot)",
        "anlit prepare 'Test\nrm -rf ~'",
        "anlit prepare 'Test",
    ],
)
def test_a_manifest_s_command_is_shown_only_if_it_is_one_of_ours(command: str, own_shards: Path) -> None:
    """An error tells the user to run it."""
    edit(own_shards / "manifest.json", lambda manifest: manifest.update(command=command))
    (own_shards / "train" / "index.json").unlink()
    with pytest.raises(UserError, match=r"index\.json is damaged .* remake it by preparing it again\.$"):
        TokenShards(str(own_shards), context_length=64).setup()
    edit(own_shards / "manifest.json", lambda manifest: manifest.update(command="anlit prepare 'a b'"))
    with pytest.raises(UserError, match=r"remake it with `anlit prepare 'a b'`\.$"):
        TokenShards(str(own_shards), context_length=64).setup()


def test_a_local_file_too_large_for_a_manifest_is_not_read(own_shards: Path) -> None:
    with open(own_shards / "manifest.json", "wb") as file:
        file.truncate(10**12)
    with pytest.raises(UserError, match=r"manifest\.json is damaged \(it has more than 268,435,456 bytes\)"):
        TokenShards(str(own_shards), context_length=64).setup()
