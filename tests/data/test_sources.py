"""A source is all that its folder holds, as it is now: links, edits, copies, several formats."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anlit import TextFiles, TokenShards
from anlit.cli import main
from anlit.data.preparation.file_lists import list_files
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import json_lines, write
from tests.data.preparing import SIZES, make, recipe_of
from tests.data.reader import edit, flip, hashes, read_json, read_texts

PREPARED_AGAIN = r"remove that folder and repeat the command to prepare it again"


def all_texts(folder: Path) -> list[str]:
    return sorted(read_texts(folder, "train") + read_texts(folder, "val"))


def test_links_to_folders_and_files_are_followed(tokenizer: str, tmp_path: Path, out: Path) -> None:
    """Also from one that lies outside, and from a link inside a folder that is reached by a link."""
    for number in range(4):
        write(tmp_path / "text" / "own" / f"{number}.txt", f"own {number}".encode())
        write(tmp_path / "elsewhere" / f"{number}.txt", f"linked {number}".encode())
        write(tmp_path / "further" / "deep" / f"{number}.txt", f"further {number}".encode())
    write(tmp_path / "alone.txt", b"alone")
    (tmp_path / "text" / "folder").symlink_to("../elsewhere")
    (tmp_path / "elsewhere" / "more").symlink_to(tmp_path / "further")
    (tmp_path / "text" / "file.txt").symlink_to(tmp_path / "alone.txt")
    make(out, recipe_of("TextFiles", tmp_path / "text", tokenizer=tokenizer, val_fraction=0.2))
    expected = [f"{kind} {number}" for kind in ("own", "linked", "further") for number in range(4)]
    assert all_texts(out) == sorted([*expected, "alone"])


def test_a_copy_of_slimpajama_whose_chunks_are_links(
    tokenizer: str, tmp_path: Path, out: Path
) -> None:
    texts = [f"document {number}" for number in range(56)]
    by_folder = {"train": texts[:42], "validation": texts[42:49], "test": texts[49:]}
    layouts.slimpajama(tmp_path / "disk", by_folder, n_files=3)
    for split in by_folder:
        for number in (1, 2, 3):
            link = tmp_path / "hub" / split / f"chunk{number}"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(tmp_path / "disk" / split / f"chunk{number}")
    manifest = make(out, recipe_of("SlimPajama", tmp_path / "hub", tokenizer=tokenizer))
    assert manifest["documents"] == 56


@pytest.mark.parametrize("pattern", ["**/*.txt", "**", "*/*.txt", "a/**/*.txt", "./**/*.txt"])
def test_a_folder_that_contains_itself_is_read_once(tmp_path: Path, pattern: str) -> None:
    write(tmp_path / "a" / "1.txt", b"one")
    (tmp_path / "a" / "again").symlink_to("..")
    (tmp_path / "a" / "itself").symlink_to(".")
    (tmp_path / "0-another-name").symlink_to("a")
    (tmp_path / "nowhere").symlink_to("nowhere")
    names = [name for name in list_files(tmp_path, pattern) if name != "nowhere"]
    assert names == ["a/1.txt"]


@pytest.mark.parametrize(("pattern", "expected"), [
    ("**/*.txt", ["1.txt", "a/2.txt", "a/b/3.txt"]), ("**/**/*.txt", ["1.txt", "a/2.txt", "a/b/3.txt"]),
    ("*.txt", ["1.txt"]), ("*/*.txt", ["a/2.txt"]), ("**/b/*", ["a/b/3.txt", "a/b/4.md"]),
    ("**/*", ["1.txt", "a/2.txt", "a/b/3.txt", "a/b/4.md"]), ("a/**", ["a/2.txt", "a/b/3.txt", "a/b/4.md"]),
    ("[a]/b/[!4]*", ["a/b/3.txt"]), (".", []), ("b/*", []),
])  # fmt: skip
def test_patterns(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    for name in ("1.txt", "a/2.txt", "a/b/3.txt", "a/b/4.md"):
        write(tmp_path / name, b"text")
    assert list(list_files(tmp_path, pattern)) == expected
    assert list_files(tmp_path / "absent", pattern) == {}


def test_a_folder_that_cannot_be_listed_is_not_left_out(tmp_path: Path, monkeypatch) -> None:
    write(tmp_path / "open" / "1.txt", b"one")
    write(tmp_path / "closed" / "2.txt", b"two")
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"closed cannot be listed \(Permission denied\): make it"):
        list_files(tmp_path, "**/*.txt")


def test_files_in_another_format_are_counted_and_named(
    tokenizer: str, tmp_path: Path, out: Path, capsys
) -> None:
    layouts.slimpajama(tmp_path / "hub", {"train": ["a", "b"], "validation": ["c"]}, n_files=1)
    write(tmp_path / "hub" / "train" / "chunk9" / "b.jsonl", json_lines(["d"])[0])
    manifest = make(out, recipe_of("SlimPajama", tmp_path / "hub", tokenizer=tokenizer))
    listed = ["train/chunk9/b.jsonl"]
    assert manifest["skipped"]["other_format"] == {"count": 1, "listed": listed}
    said = capsys.readouterr().err
    assert "1 files are left out, because they may be copies in another format; the first" in said


def texts_folder(folder: Path) -> Path:
    for number in range(6):
        write(folder / f"{number}.txt", f"the text of number {number}".encode())
    return folder


def lines_folder(folder: Path) -> Path:
    for number in range(3):
        lines = json_lines(f"the text of number {number} {line}" for line in range(9))
        write(folder / f"{number}.jsonl", b"".join(lines))
    return folder


SOURCES: list[tuple[Callable[[Path], Path], str]] = [
    (texts_folder, "1.txt"),
    (lines_folder, "1.jsonl"),
]


def edit_text(path: Path) -> None:
    """Another text of the same size, as an editor writes it a moment later."""
    content = path.read_bytes()
    path.write_bytes(content.replace(b"number", b"NUMBER"))
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 10_000_000))
    assert path.stat().st_size == len(content)


@pytest.mark.parametrize(("write_source", "name"), SOURCES)
def test_an_edited_text_of_the_same_size_is_noticed_at_the_next_prepare(
    write_source: Callable[[Path], Path], name: str, tmp_path: Path, out: Path, capsys
) -> None:
    source = write_source(tmp_path / "text")
    pattern = f"*{Path(name).suffix}"
    options = ["--vocab_size", "260", "--val_fraction", "0.3", "--pattern", pattern]
    command = ["prepare", "TextFiles", "--source", str(source), "--output", str(out), *options]
    assert main(command) == 0
    before = hashes(out)
    edit_text(source / name)
    assert main(command) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.search(rf"{name} is not what .*out was prepared from: {PREPARED_AGAIN}", said)
    assert hashes(out) == before
    shutil.rmtree(out)
    assert main(command) == 0
    assert any("NUMBER" in text for text in all_texts(out))


@pytest.mark.parametrize(("write_source", "name"), SOURCES)
def test_an_edited_text_of_the_same_size_is_noticed_at_the_next_fit(
    write_source: Callable[[Path], Path], name: str, tmp_path: Path, out: Path
) -> None:
    source = write_source(tmp_path / "text")
    options: dict[str, Any] = {"vocab_size": 260, "val_fraction": 0.3}
    data = TextFiles(str(source), str(out), pattern=f"*{Path(name).suffix}", **options)
    data.prepare_data()
    data.prepare_data()
    edit_text(source / name)
    with pytest.raises(UserError, match=rf"{name} is not what .* was prepared from"):
        data.prepare_data()


@pytest.mark.parametrize(("write_source", "name"), SOURCES)
def test_an_edit_that_keeps_size_and_time_is_noticed_by_verify(
    write_source: Callable[[Path], Path], name: str, tokenizer: str, tmp_path: Path, out: Path
) -> None:
    source = write_source(tmp_path / "text")
    pattern = f"*{Path(name).suffix}"
    recipe = recipe_of(
        "TextFiles", source, SIZES, tokenizer=tokenizer, pattern=pattern, val_fraction=0.3
    )
    make(out, recipe)
    make(out, recipe, verify=True)
    status = (source / name).stat()
    edit_text(source / name)
    os.utime(source / name, ns=(status.st_atime_ns, status.st_mtime_ns))
    make(out, recipe)
    with pytest.raises(UserError, match=rf"{name} is not what .*out was prepared from"):
        make(out, recipe, verify=True)


@pytest.mark.parametrize(("write_source", "name"), SOURCES)
def test_a_source_that_was_copied_is_compared_once_and_found_the_same(
    write_source: Callable[[Path], Path], name: str, tmp_path: Path, out: Path, capsys, monkeypatch
) -> None:
    source = write_source(tmp_path / "text")
    options = ["--vocab_size", "260", "--val_fraction", "0.3", "--pattern", f"*{Path(name).suffix}"]
    command = ["prepare", "TextFiles", "--source", str(source), "--output", str(out), *options]
    assert main(command) == 0
    for path in source.iterdir():
        os.utime(path, ns=(1, 1))
    capsys.readouterr()
    assert main(command) == 0
    said = capsys.readouterr().err
    assert re.search(r"Comparing \d source files with .*out, because the time of one", said)
    assert "Their contents are the same." in said
    assert main(command) == 0
    assert "Comparing" not in capsys.readouterr().err


def test_sources_that_are_gone_or_a_copy_without_records(tmp_path: Path, out: Path, capsys) -> None:
    """What is not there is not compared, and that the records are missing is said."""
    data = TextFiles(str(texts_folder(tmp_path / "text")), str(out), vocab_size=260)
    data.prepare_data()
    shutil.copytree(out, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "tasks")
    copy = TextFiles(str(tmp_path / "text"), str(tmp_path / "copy"), vocab_size=260)
    capsys.readouterr()
    copy.prepare_data()
    assert "copy/tasks is not complete, so nobody can tell" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "text")
    for module in (data, copy):
        module.prepare_data()
    assert capsys.readouterr().err == ""


def another_train(folder: Path, other: Path) -> None:
    """As many tokens of another corpus."""
    shutil.rmtree(folder / "train")
    shutil.copytree(other / "train", folder / "train")


def swap_chunks(folder: Path) -> None:
    edit(folder / "train" / "index.json", lambda index: index["chunks"].reverse())


def in_manifest(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: edit(folder / "manifest.json", lambda manifest: manifest.update(changes))


@pytest.mark.parametrize("damage", [
    swap_chunks, in_manifest(end_of_document=7), in_manifest(document_token_at="start"), None,
])  # fmt: skip
def test_a_folder_that_is_not_what_its_manifest_says_is_refused_and_mended(
    damage: Callable[[Path], object] | None, tokenizer: str, tmp_path: Path, out: Path, capsys
) -> None:
    """None: train/ is that of another corpus with as many tokens."""
    recipes = []
    for name, word in (("one", "number"), ("other", "NUMBER")):
        source = texts_folder(tmp_path / name)
        for path in source.iterdir():
            path.write_text(" ".join(f"{word} {path.stem} of {line}" for line in range(999)))
        recipes.append(recipe_of("TextFiles", source, SIZES, tokenizer=tokenizer))
    make(out, recipes[0])
    before = hashes(out)
    if damage is None:
        make(tmp_path / "second", recipes[1])
        counts = [
            read_json(folder / "manifest.json")["train"] for folder in (out, tmp_path / "second")
        ]
        edit(out / "manifest.json", lambda manifest: manifest.update(train=counts[1]))
        another_train(out, tmp_path / "second")
    else:
        damage(out)
    data = TokenShards(str(out), context_length=16)
    with pytest.raises(
        UserError, match=r"out is damaged \(manifest\.json and the chunks that each"
    ):
        data.setup()
    make(out, recipes[0])
    assert "making again what is lost" in capsys.readouterr().err
    assert hashes(out) == before


@pytest.mark.parametrize("damage", [
    in_manifest(documents=7), in_manifest(bytes=7), in_manifest(vocab_size=900),
    lambda folder: flip(next(folder.glob("train/chunk-*"))),
])  # fmt: skip
def test_verify_compares_counts_and_contents(
    damage: Callable[[Path], object], tokenizer: str, tmp_path: Path, out: Path
) -> None:
    recipe = recipe_of("TextFiles", texts_folder(tmp_path / "text"), tokenizer=tokenizer)
    make(out, recipe)
    before = hashes(out)
    damage(out)
    make(out, recipe, verify=True)
    assert hashes(out) == before
