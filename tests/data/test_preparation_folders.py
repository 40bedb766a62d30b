"""A folder with other sources or settings, a damaged or a foreign folder; bad documents."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anlit.cli import main
from anlit.data.preparation import encode
from anlit.data.preparation.recipes import RECIPES, Recipe
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import json_lines, short_documents, write
from tests.data.preparing import (
    SIZES,
    assert_makes,
    interrupt,
    make,
    recipe_of,
    record_times,
    train_tokenizer,
)
from tests.data.reader import assert_holds, edit, flip, hashes, read_records


@pytest.fixture
def copied_hub(session_folder: Path, tmp_path: Path) -> Path:
    """A copy of the source of `recipe`, which a test may change."""
    return Path(shutil.copytree(session_folder / "hub", tmp_path / "hub"))


@pytest.fixture
def copied_recipe(recipe: Recipe, copied_hub: Path, tokenizer: str) -> Recipe:
    """The same as `recipe`, for `copied_hub`."""
    return recipe_of("OpenWebText", copied_hub, SIZES, tokenizer=tokenizer, val_fraction=0.2)


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_source_file_that_has_changed(
    copied_recipe: Recipe, copied_hub: Path, finished: Path, out: Path, is_finished: bool
) -> None:
    """Even if it keeps its length: for an unfinished folder, or for a folder that is mended."""
    if is_finished:
        make(out, copied_recipe)
        next((out / "val").glob("chunk-*")).unlink()
    else:
        interrupt(out, copied_recipe, tasks=1)
    file = copied_hub / "plain_text" / "train-00000-of-00080.parquet"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"document", b"DOCUMENT").replace(b"a", b"b"))

    message = r"train-00000-of-00080\.parquet is not what .*out was begun with: put the old"
    with pytest.raises(UserError, match=message):
        make(out, copied_recipe)

    file.write_bytes(content)
    assert_makes(out, copied_recipe, finished)


def test_a_source_file_that_changes_while_it_is_read(
    copied_recipe: Recipe, copied_hub: Path, finished: Path, out: Path, monkeypatch
) -> None:
    """Chunks of a task that was given up do not stay."""
    file = copied_hub / "plain_text" / "train-00001-of-00080.parquet"
    content = file.read_bytes()
    split_of_document = encode.split_of_document

    def write_file_and_split(*arguments: Any) -> str:
        file.write_bytes(content)
        return split_of_document(*arguments)

    monkeypatch.setattr(encode, "split_of_document", write_file_and_split)

    with pytest.raises(UserError, match=r"\.parquet was changed while it was read: repeat"):
        make(out, copied_recipe)

    monkeypatch.undo()
    write(out / "train" / "chunk-000001-007.bin", b"of documents that are gone")
    assert_makes(out, copied_recipe, finished)


def test_a_text_file_that_changes_meanwhile(tokenizer: str, source: Path, out: Path) -> None:
    layouts.text_files(source, short_documents(50, seed=3))
    recipe = recipe_of("TextFiles", source, SIZES, tokenizer=tokenizer)
    interrupt(out, recipe, tasks=3)
    file = source / "part0" / "0.txt"
    file.write_bytes(b"x" * file.stat().st_size)

    message = r"The source files or .* are not what .*out was begun with: put"
    with pytest.raises(UserError, match=message):
        make(out, recipe)


@pytest.mark.parametrize(
    ("corpus", "option", "difference"),
    [
        (
            "OpenWebText",
            {"val_fraction": 0.3},
            r"\(splits.fraction 0.2 → 0.3\)",
        ),
        ("OpenWebText", {"tokenizer": "bpe"}, "vocab_size None → 4096"),
        ("OpenWebText", {"tokenizer": "another.json"}, r"tokenizer sha256:\w+ → sha256"),
        ("FineWeb", {"val_fraction": None}, "corpus OpenWebText → FineWeb"),
    ],
)
def test_other_settings_are_refused(
    corpus: str,
    option: dict[str, Any],
    difference: str,
    recipe: Recipe,
    finished: Path,
    session_folder: Path,
    tokenizer: str,
    tmp_path: Path,
    out: Path,
    monkeypatch,
) -> None:
    """By a finished folder and by an unfinished folder; neither is touched."""
    monkeypatch.chdir(tmp_path)
    train_tokenizer(tmp_path / "another.json", 300)
    interrupt(out, recipe, tasks=2)
    options = {"tokenizer": tokenizer, "val_fraction": 0.2} | option
    other_recipe = recipe_of(corpus, session_folder / "hub", SIZES, **options)
    for folder in (finished, out):
        contents = hashes(folder)

        message = f"was prepared with other settings .*{difference}.*: remove the folder"
        with pytest.raises(UserError, match=message):
            make(folder, other_recipe)

        assert hashes(folder) == contents


def test_the_same_tokenizer_in_another_folder_is_the_same(
    recipe: Recipe, finished: Path, session_folder: Path, tokenizer: str, tmp_path: Path, out: Path
) -> None:
    interrupt(out, recipe, tasks=2)
    moved = str(shutil.copy(tokenizer, tmp_path / "moved.json"))

    moved_recipe = recipe_of(
        "OpenWebText", session_folder / "hub", SIZES, tokenizer=moved, val_fraction=0.2
    )

    assert_makes(out, moved_recipe, finished)


CHUNK = "train/chunk-000003-000.bin"
RECORD = "tasks/000003.json"
INDEX = "train/index.json"
DamageFile = Callable[[Path], object]


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def in_json(change: Callable[[dict[str, Any]], Any]) -> DamageFile:
    """Return a function that changes the content of a JSON file."""
    return lambda path: edit(path, change)


def rename_stream(record: dict[str, Any]) -> None:
    record["streams"]["train/../train"] = record["streams"].pop("train")


def drop_chunk(record: dict[str, Any]) -> None:
    record["streams"]["train"]["chunks"][0].pop()


def miscount_skipped(record: dict[str, Any]) -> None:
    record["files"][0].update(skipped={"empty": "many"})


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (CHUNK, Path.unlink),
        (CHUNK, halve),
        (CHUNK, flip),
        (RECORD, Path.unlink),
        (RECORD, halve),
        (RECORD, in_json(rename_stream)),
        (RECORD, in_json(drop_chunk)),
        (RECORD, in_json(miscount_skipped)),
        ("tokenizer.json", Path.unlink),
        ("tokenizer.json", halve),
        (INDEX, Path.unlink),
        (INDEX, halve),
    ],
)
def test_a_damaged_file_is_made_again(
    name: str, damage: DamageFile, recipe: Recipe, finished: Path, tmp_path: Path, capsys
) -> None:
    """By the task that made it alone. Only `verify` reads all chunks."""
    folder = tmp_path / "a" / "b" / "out"
    shutil.copytree(finished, folder)
    damage(folder / name)
    if name == RECORD:  # readers do not need it, so such a folder counts as finished
        (folder / "manifest.json").unlink()
    times = record_times(folder)
    if damage is flip:
        make(folder, recipe)
        assert hashes(folder) != hashes(finished)

    assert_makes(folder, recipe, finished, verify=damage is flip)

    repeated = []
    for task, time in record_times(folder).items():
        if times.get(task) != time:
            repeated.append(task)
    expected = [3] if "000003" in name else []
    assert repeated == expected
    message = rf"{Path(name).name}\b.*: making again what is lost\.\n"
    if name != RECORD:
        assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def damage_hash(record: dict[str, Any]) -> None:
    record["files"][0]["sha256"] = [1]


def damage_name(record: dict[str, Any]) -> None:
    record["files"][0]["name"] = 3


@pytest.mark.parametrize("change", [damage_hash, damage_name])
def test_a_hash_that_no_task_wrote_differs_from_the_source_file(
    change: Callable[[dict[str, Any]], None], recipe: Recipe, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "out")
    edit(tmp_path / "out" / RECORD, change)

    with pytest.raises(UserError, match=r"is not what .*out was prepared from: remove"):
        make(tmp_path / "out", recipe, verify=True)


def write_brace(path: Path) -> None:
    path.write_text("{")


def lead_commit_astray(plan: dict[str, Any]) -> None:
    plan["commit"] = 13 * "../" + "x"


@pytest.mark.parametrize("damage", [Path.unlink, write_brace, in_json(lead_commit_astray)])
def test_a_folder_with_a_damaged_plan(damage: DamageFile, recipe: Recipe, out: Path) -> None:
    interrupt(out, recipe, tasks=1)
    damage(out / "tasks" / "plan.json")

    message = r"plan\.json cannot be .*: copy the folder again, or remove it and repeat"
    with pytest.raises(UserError, match=message):
        make(out, recipe)


@pytest.mark.parametrize("name", ["tasks", "train"])
def test_links_are_not_followed(
    name: str, recipe: Recipe, finished: Path, tmp_path: Path, out: Path
) -> None:
    """A foreign folder that has to be mended may have a link to the user's own files."""
    target = tmp_path / "elsewhere"
    shutil.copytree(finished, out)
    (out / "manifest.json").unlink()
    (out / name).rename(target)
    (out / name).symlink_to(target)
    next(path for path in target.iterdir() if "000003" in path.name).unlink()
    contents = hashes(target)

    message = rf"{name} is a symbolic link, and nothing is written through one: remove"
    with pytest.raises(UserError, match=message):
        make(out, recipe)

    assert hashes(target) == contents


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "train/precious.bin",
            b"precious",
            r"is not a prepared folder, it has no manifest\.json but train: choose",
        ),
        ("manifest.json", b'{"name": "of something else"}', r"manifest\.json is damaged"),
        (".", b"precious", "out is a file: choose a folder with --output"),
    ],
)
def test_something_else_is_not_touched(
    name: str, content: bytes, message: str, recipe: Recipe, out: Path
) -> None:
    write(out / name, content)
    contents = hashes(out.parent)

    with pytest.raises(UserError, match=message):
        make(out, recipe)

    assert hashes(out.parent) == contents


BPE = {"tokenizer": "bpe", "vocab_size": 300}
JSON_LINES = {**BPE, "pattern": "*.jsonl", "text_field": "content", "val_fraction": 0.5}


@pytest.mark.parametrize(
    ("corpus", "wrong", "right", "message"),
    [
        (
            "FineWeb",
            BPE,
            BPE | {"val_tokens": 5},
            r"too few to hold out 10,485,760 of them: set --val_tokens",
        ),
        (
            "TextFiles",
            JSON_LINES | {"val_fraction": 1e-9},
            JSON_LINES,
            "leaves no document for val, .*, or hold out another .* \\(--val_fraction of your",
        ),
        (
            "TextFiles",
            JSON_LINES | {"text_field": "txt"},
            JSON_LINES,
            'the field "txt" is missing or null',
        ),
    ],
    ids=["val_tokens", "val_fraction", "text_field"],
)
def test_a_wrong_option_does_not_stand_in_the_way_of_the_right_one(
    corpus: str,
    wrong: dict[str, Any],
    right: dict[str, Any],
    message: str,
    source: Path,
    out: Path,
) -> None:
    """The first task cannot be done with it, so little is lost by beginning anew."""
    layouts.fineweb(source, ["a few words", "and some more"] * 3, n_files=1)
    layouts.json_files(source, [f"text {number}" for number in range(40)])

    with pytest.raises(UserError, match=message):
        make(out, recipe_of(corpus, source, **wrong))

    make(out, recipe_of(corpus, source, **right))


def test_a_bad_line_stops_or_is_skipped(
    tokenizer: str, source: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Earlier tasks are kept. The file is cut into pieces, and lines count from its beginning."""
    texts = short_documents(50, seed=3)
    lines = json_lines(texts)
    lines.insert(30, b'{"text": "x", "meta": {}}\n')
    write(source / "train" / "chunk1" / "a.jsonl", b"".join(lines))
    write(source / "validation" / "chunk1" / "a.jsonl", json_lines(["val"])[0])
    recipe = recipe_of("SlimPajama", source, SIZES, tokenizer=tokenizer)
    monkeypatch.setitem(RECIPES, "SlimPajama", recipe)
    monkeypatch.chdir(tmp_path)
    command = ["prepare", "SlimPajama", "--output", "out"]

    assert main([*command, "--workers", "1"]) == 2

    message = capsys.readouterr().err.strip().splitlines()[-1]
    detail = 'the field "meta.redpajama_set_name" is missing or null and not a name'
    location = r"anlit: error: .*source/train/chunk1/a\.jsonl, line 31"
    assert re.match(rf"{location}: {detail}: repair the file, or leave", message)
    remedy = "such documents out with anlit prepare's --on_bad skip"
    assert message.endswith(f"{remedy}; what is done so far is kept")
    times = record_times(Path("out"))
    assert len(times) > 2

    assert main([*command, "--on_bad", "skip"]) == 0

    assert times.items() < record_times(Path("out")).items()
    summary = "51 documents, 1 skipped (no_subset_field: 1, such as train/chunk1/a.jsonl, line 31)"
    assert summary in capsys.readouterr().err
    skipped = []
    for record in read_records(Path("out")):
        for file in record["files"]:
            skipped += file.get("skipped_list", [])
    assert skipped == [["line 31", "no_subset_field", detail]]
    assert_holds(Path("out"), {"train/RedPajamaC4": texts, "val/RedPajamaC4": ["val"]})


def test_a_corpus_without_validation_tells_what_was_skipped(source: Path, out: Path) -> None:
    write(source / "a.jsonl", b'{"text": "a"}\n{"content": "b"}\n{"content": "c"}\n')
    recipe = recipe_of("TextFiles", source, pattern="*.jsonl", vocab_size=257)

    with pytest.raises(UserError, match=r"1 document\(s\) in 1 file\(s\).* \(no_text_field 2\)"):
        make(out, recipe, skip_bad=True)


def test_a_folder_of_ones_own_is_not_in_the_hubs_layout(source: Path, out: Path) -> None:
    recipe = recipe_of("TextFiles", source, pattern="*.jsonl")

    with pytest.raises(UserError, match=r"no folder .*source: set --source .*, --pattern"):
        make(out, recipe)
