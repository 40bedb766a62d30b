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
from anlit.data.preparation.recipes import Recipe
from anlit.data.preparation.sources import list_files
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import json_lines, write
from tests.data.preparing import SIZES, make, recipe_of
from tests.data.reader import all_texts, edit, flip, hashes


def test_links_to_folders_and_files_are_followed(
    tokenizer: str, source: Path, tmp_path: Path, out: Path
) -> None:
    """Also a link from outside, and a link inside a folder that is reached by a link."""
    linked = tmp_path / "linked"
    further = tmp_path / "further"
    for number in range(4):
        write(source / "inside" / f"{number}.txt", f"inside {number}".encode())
        write(linked / f"{number}.txt", f"linked {number}".encode())
        write(further / "deep" / f"{number}.txt", f"further {number}".encode())
    file = write(tmp_path / "alone.txt", b"alone")
    (source / "folder").symlink_to("../linked")
    (linked / "more").symlink_to(further)
    (source / "file.txt").symlink_to(file)

    make(out, recipe_of("TextFiles", source, tokenizer=tokenizer, val_fraction=0.2))

    expected = ["alone"]
    for number in range(4):
        expected += [f"inside {number}", f"linked {number}", f"further {number}"]
    assert all_texts(out) == sorted(expected)


def test_a_copy_of_slimpajama_with_links_to_its_chunks(
    tokenizer: str, source: Path, tmp_path: Path, out: Path
) -> None:
    texts = [f"document {number}" for number in range(56)]
    texts_by_folder = {"train": texts[:42], "validation": texts[42:49], "test": texts[49:]}
    layouts.slimpajama(tmp_path / "disk", texts_by_folder, n_files=3)
    for split in texts_by_folder:
        for chunk in ("chunk1", "chunk2", "chunk3"):
            link = source / split / chunk
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(tmp_path / "disk" / split / chunk)

    manifest = make(out, recipe_of("SlimPajama", source, tokenizer=tokenizer))

    assert manifest["documents"] == 56


@pytest.mark.parametrize("pattern", ["**/*.txt", "**", "*/*.txt", "a/**/*.txt", "./**/*.txt"])
def test_a_folder_that_contains_itself_is_read_once(tmp_path: Path, pattern: str) -> None:
    write(tmp_path / "a" / "1.txt", b"one")
    (tmp_path / "a" / "again").symlink_to("..")
    (tmp_path / "a" / "itself").symlink_to(".")
    (tmp_path / "0-another-name").symlink_to("a")
    (tmp_path / "nowhere").symlink_to("nowhere")

    names = list_files(tmp_path, pattern).keys()

    assert names - {"nowhere"} == {"a/1.txt"}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**/*.txt", ["1.txt", "a/2.txt", "a/b/3.txt"]),
        ("**/**/*.txt", ["1.txt", "a/2.txt", "a/b/3.txt"]),
        ("*.txt", ["1.txt"]),
        ("*/*.txt", ["a/2.txt"]),
        ("**/b/*", ["a/b/3.txt", "a/b/4.md"]),
        ("**/*", ["1.txt", "a/2.txt", "a/b/3.txt", "a/b/4.md"]),
        ("a/**", ["a/2.txt", "a/b/3.txt", "a/b/4.md"]),
        ("[a]/b/[!4]*", ["a/b/3.txt"]),
        (".", []),
        ("b/*", []),
    ],
)
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
    tokenizer: str, source: Path, out: Path, capsys
) -> None:
    layouts.slimpajama(source, {"train": ["a", "b"], "validation": ["c"]}, n_files=1)
    write(source / "train" / "chunk9" / "b.jsonl", json_lines(["d"])[0])

    manifest = make(out, recipe_of("SlimPajama", source, tokenizer=tokenizer))

    skipped = {"count": 1, "listed": ["train/chunk9/b.jsonl"]}
    assert manifest["skipped"]["other_format"] == skipped
    message = "1 files are left out, because they may be copies in another format; the first"
    assert message in capsys.readouterr().err


def write_text_files(folder: Path) -> None:
    for number in range(6):
        write(folder / f"{number}.txt", f"the text of number {number}".encode())


def write_json_files(folder: Path) -> None:
    for number in range(3):
        texts = [f"the text of number {number} {line}" for line in range(9)]
        write(folder / f"{number}.jsonl", b"".join(json_lines(texts)))


each_source = pytest.mark.parametrize(
    ("write_source", "name"), [(write_text_files, "1.txt"), (write_json_files, "1.jsonl")]
)
"""The function that writes a source, and a file of it."""
WriteSource = Callable[[Path], None]


def edit_text(path: Path) -> None:
    """Another text of the same size, as an editor writes it a moment later."""
    content = path.read_bytes()
    path.write_bytes(content.replace(b"number", b"NUMBER"))
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 10_000_000))
    assert path.stat().st_size == len(content)


def prepare_command(source: Path, name: str, out: Path) -> list[str]:
    """Return the command that prepares all files with the ending of `name`."""
    command = ["prepare", "TextFiles", "--source", str(source), "--output", str(out)]
    command += ["--vocab_size", "260", "--val_fraction", "0.3"]
    return [*command, "--pattern", f"*{Path(name).suffix}"]


@each_source
def test_an_edited_text_of_the_same_size_is_noticed_at_the_next_prepare(
    write_source: WriteSource, name: str, source: Path, out: Path, capsys
) -> None:
    write_source(source)
    command = prepare_command(source, name, out)
    assert main(command) == 0
    finished = hashes(out)
    edit_text(source / name)

    assert main(command) == 2

    message = capsys.readouterr().err.splitlines()[-1]
    remedy = r"remove that folder and repeat the command to prepare it again"
    assert re.search(rf"{name} is not what .*out was prepared from: {remedy}", message)
    assert hashes(out) == finished

    shutil.rmtree(out)
    assert main(command) == 0
    assert any("NUMBER" in text for text in all_texts(out))


@each_source
def test_an_edited_text_of_the_same_size_is_noticed_at_the_next_fit(
    write_source: WriteSource, name: str, source: Path, out: Path
) -> None:
    write_source(source)
    options: dict[str, Any] = {"vocab_size": 260, "val_fraction": 0.3}
    data = TextFiles(str(source), str(out), pattern=f"*{Path(name).suffix}", **options)
    data.prepare_data()
    data.prepare_data()
    edit_text(source / name)

    with pytest.raises(UserError, match=rf"{name} is not what .* was prepared from"):
        data.prepare_data()


@each_source
def test_an_edit_that_keeps_size_and_time_is_noticed_by_verify(
    write_source: WriteSource, name: str, tokenizer: str, source: Path, out: Path
) -> None:
    write_source(source)
    options = {"tokenizer": tokenizer, "pattern": f"*{Path(name).suffix}", "val_fraction": 0.3}
    recipe = recipe_of("TextFiles", source, SIZES, **options)
    make(out, recipe)
    make(out, recipe, verify=True)
    file = source / name
    status = file.stat()
    edit_text(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    make(out, recipe)  # does not notice it

    with pytest.raises(UserError, match=rf"{name} is not what .*out was prepared from"):
        make(out, recipe, verify=True)


@each_source
def test_a_source_that_was_copied_is_compared_once_and_found_the_same(
    write_source: WriteSource, name: str, source: Path, out: Path, capsys
) -> None:
    write_source(source)
    command = prepare_command(source, name, out)
    assert main(command) == 0
    for path in source.iterdir():
        os.utime(path, ns=(1, 1))
    capsys.readouterr()

    assert main(command) == 0

    printed = capsys.readouterr().err
    assert re.search(r"Comparing \d source files with .*out, because the time of one", printed)
    assert "Their contents are the same." in printed

    assert main(command) == 0
    assert "Comparing" not in capsys.readouterr().err


@each_source
def test_a_project_that_moved_with_its_sources_goes_on(
    write_source: WriteSource, name: str, tmp_path: Path, capsys
) -> None:
    """Its shards are read, with the sources and without them. Edited sources are refused."""
    write_source(tmp_path / "project" / "texts")
    assert main(prepare_command(tmp_path / "project" / "texts", name, tmp_path / "project/o")) == 0
    project = (tmp_path / "project").rename(tmp_path / "moved")
    command = prepare_command(project / "texts", name, project / "o")
    contents = hashes(project / "o")

    assert main(command) == 0
    edit_text(project / "texts" / name)
    assert main([*command, "--verify"]) == 2
    assert f"{name} is not what" in capsys.readouterr().err
    shutil.rmtree(project / "texts")
    assert main(command) == 0

    assert re.search(r"texts has no files, so .*prepared from .*project", capsys.readouterr().err)
    assert hashes(project / "o") == contents


def test_sources_of_many_kinds_that_are_gone(source: Path, out: Path) -> None:
    """The pattern does not tell that some files had many documents."""
    write_json_files(source)
    data = TextFiles(str(source), str(out), pattern="**/*", vocab_size=260, val_fraction=0.5)
    data.prepare_data()
    shutil.rmtree(source)

    data.prepare_data()

    data.recipe_options["val_fraction"] = 0.4
    with pytest.raises(UserError, match=r"fraction 0.5 → 0.4\)"):
        data.prepare_data()


def test_sources_that_are_gone_or_a_copy_without_records(
    source: Path, tmp_path: Path, out: Path, capsys
) -> None:
    """Files that are gone are not compared. A message names missing records."""
    write_text_files(source)
    data = TextFiles(str(source), str(out), vocab_size=260)
    data.prepare_data()
    folder = tmp_path / "copy"
    shutil.copytree(out, folder)
    shutil.rmtree(folder / "tasks")
    copy = TextFiles(str(source), str(folder), vocab_size=260)
    capsys.readouterr()

    copy.prepare_data()

    assert "copy/tasks is not complete, so nobody can tell" in capsys.readouterr().err

    shutil.rmtree(source)
    data.prepare_data()
    copy.prepare_data()
    assert capsys.readouterr().err == ""


Damage = Callable[[Path], object]


def swap_chunks(folder: Path) -> None:
    edit(folder / "train" / "index.json", lambda index: index["chunks"].reverse())


def in_manifest(**changes: Any) -> Damage:
    """Return a function that changes values in a folder's manifest."""

    def change(folder: Path) -> None:
        edit(folder / "manifest.json", lambda manifest: manifest.update(changes))

    return change


def recipe_of_numbers(folder: Path, word: str, tokenizer: str) -> Recipe:
    """Write texts that are as long with any word of six letters; return their recipe."""
    for number in range(6):
        phrases = [f"{word} {number} of {place}" for place in range(999)]
        write(folder / f"{number}.txt", " ".join(phrases).encode())
    return recipe_of("TextFiles", folder, SIZES, tokenizer=tokenizer)


@pytest.mark.parametrize(
    "damage",
    [swap_chunks, in_manifest(end_of_document=7), in_manifest(document_token_at="start")],
    ids=["chunks", "end_of_document", "document_token_at"],
)
def test_a_folder_that_is_not_what_its_manifest_says_is_refused_and_mended(
    damage: Damage, tokenizer: str, source: Path, out: Path, capsys
) -> None:
    recipe = recipe_of_numbers(source, "number", tokenizer)
    make(out, recipe)
    finished = hashes(out)
    damage(out)

    assert_refused_and_mended(out, recipe, finished, capsys)


def test_chunks_of_another_corpus_with_as_many_tokens_are_refused_and_mended(
    tokenizer: str, source: Path, tmp_path: Path, out: Path, capsys
) -> None:
    recipe = recipe_of_numbers(source, "number", tokenizer)
    make(out, recipe)
    finished = hashes(out)
    other = tmp_path / "other"
    other_manifest = make(other, recipe_of_numbers(tmp_path / "OTHER", "NUMBER", tokenizer))
    use_other_counts = in_manifest(train=other_manifest["train"])
    use_other_counts(out)
    shutil.rmtree(out / "train")
    shutil.copytree(other / "train", out / "train")

    assert_refused_and_mended(out, recipe, finished, capsys)


def assert_refused_and_mended(folder: Path, recipe: Recipe, finished: object, capsys) -> None:
    """Training refuses the folder, and preparing makes it as it was."""
    data = TokenShards(str(folder), context_length=16)
    message = r"out is damaged \(manifest\.json and the chunks that each"
    with pytest.raises(UserError, match=message):
        data.setup()

    make(folder, recipe)

    assert "making again what is lost" in capsys.readouterr().err
    assert hashes(folder) == finished


def flip_chunk(folder: Path) -> None:
    flip(next(folder.glob("train/chunk-*")))


@pytest.mark.parametrize(
    "damage",
    [in_manifest(documents=7), in_manifest(bytes=7), in_manifest(vocab_size=900), flip_chunk],
    ids=["documents", "bytes", "vocab_size", "chunk"],
)
def test_verify_compares_counts_and_contents(
    damage: Damage, tokenizer: str, source: Path, out: Path
) -> None:
    write_text_files(source)
    recipe = recipe_of("TextFiles", source, tokenizer=tokenizer)
    make(out, recipe)
    finished = hashes(out)
    damage(out)

    make(out, recipe, verify=True)

    assert hashes(out) == finished
