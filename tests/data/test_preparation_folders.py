"""A folder whose sources or settings have changed, that is damaged, or that is something else; bad documents."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anlit.cli import main
from anlit.data.preparation.recipes import RECIPES, Recipe
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import documents, json_lines, write
from tests.data.preparing import (
    SIZES,
    assert_makes,
    interrupted,
    make,
    recipe_of,
    train_tokenizer,
    written,
)
from tests.data.reader import assert_holds, edit, flip, hashes, read_records


@pytest.fixture
def own_hub(recipe: Recipe, place: Path, tmp_path: Path, tokenizer: str) -> Recipe:
    shutil.copytree(place / "hub", tmp_path / "hub")
    return recipe_of("OpenWebText", tmp_path / "hub", SIZES, tokenizer=tokenizer, val_fraction=0.2)


@pytest.mark.parametrize("lost", [False, True])
def test_a_source_file_that_has_changed(
    own_hub: Recipe, finished: Path, tmp_path: Path, out: Path, lost: bool
) -> None:
    """Even if it keeps its length: of an unfinished folder, or of one that is mended."""
    if lost:
        make(out, own_hub)
        next((out / "val").glob("chunk-*")).unlink()
    else:
        interrupted(out, own_hub, tasks=1)
    file = tmp_path / "hub" / "plain_text" / "train-00000-of-00080.parquet"
    before = file.read_bytes()
    file.write_bytes(before.replace(b"document", b"DOCUMENT").replace(b"a", b"b"))
    with pytest.raises(
        UserError,
        match=r"train-00000-of-00080\.parquet is not what .*out was begun with: put the old",
    ):
        make(out, own_hub)
    file.write_bytes(before)
    assert_makes(out, own_hub, finished)


def test_a_source_file_that_changes_while_it_is_read(
    own_hub: Recipe, finished: Path, out: Path, monkeypatch
) -> None:
    """And chunks of a task that was given up do not stay."""
    file = own_hub.source.paths["plain_text/train-00001-of-00080.parquet"]
    before, of_text = file.read_bytes(), Splits.of_text
    monkeypatch.setattr(
        Splits, "of_text", lambda *text: (file.write_bytes(before), of_text(*text))[1]
    )
    with pytest.raises(UserError, match=r"\.parquet was changed while it was read: repeat"):
        make(out, own_hub)
    monkeypatch.undo()
    write(out / "train" / "chunk-000001-007.bin", b"of documents that are gone")
    assert_makes(out, own_hub, finished)


def test_a_text_file_that_changes_meanwhile(tokenizer: str, tmp_path: Path, out: Path) -> None:
    layouts.text_files(tmp_path / "text", list(documents(60, seed=3))[10:])
    interrupted(out, recipe_of("TextFiles", tmp_path / "text", SIZES, tokenizer=tokenizer), tasks=3)
    file = tmp_path / "text" / "part0" / "0.txt"
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(
        UserError, match=r"The source files or .* are not what .*out was begun with: put"
    ):
        make(out, recipe_of("TextFiles", tmp_path / "text", SIZES, tokenizer=tokenizer))


def test_other_settings_are_refused(
    recipe: Recipe, finished: Path, place: Path, tokenizer: str, tmp_path: Path, out: Path
) -> None:
    same: dict[str, Any] = {"tokenizer": tokenizer, "val_fraction": 0.2}
    another = str(train_tokenizer(tmp_path / "b.json", 300))
    interrupted(out, recipe, tasks=2)
    for corpus, options, differs in (
        (
            "OpenWebText",
            {"val_fraction": 0.3},
            r"splits \{.*'fraction': 0.2.*\} → \{.*'fraction': 0.3",
        ),
        ("OpenWebText", {"tokenizer": "bpe"}, "vocab_size None → 4096"),
        ("OpenWebText", {"tokenizer": another}, r"tokenizer sha256:\w+ → sha256"),
        ("FineWeb", {}, "corpus OpenWebText → FineWeb"),
    ):
        for folder in (finished, out):
            before = hashes(folder)
            with pytest.raises(
                UserError,
                match=f"was prepared with other settings .*{differs}.*: remove the folder",
            ):
                make(folder, recipe_of(corpus, place / "hub", SIZES, **same | options))
            assert hashes(folder) == before
    same["tokenizer"] = str(
        shutil.copy(tokenizer, tmp_path / "moved.json")
    )  # the same file elsewhere is the same
    assert_makes(out, recipe_of("OpenWebText", place / "hub", SIZES, **same), finished)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def in_record(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    return lambda path: edit(path, change)


CHUNK, TASK, INDEX = "train/chunk-000003-000.bin", "tasks/000003.json", "train/index.json"


@pytest.mark.parametrize(("name", "damage"), [
    *((CHUNK, damage) for damage in (Path.unlink, shorten, flip)),
    *((TASK, damage) for damage in (Path.unlink, shorten)),
    (TASK, in_record(lambda record: record["streams"].update({"train/../train": record["streams"].pop("train")}))),
    (TASK, in_record(lambda record: record["streams"]["train"]["chunks"][0].pop())),
    (TASK, in_record(lambda record: record["files"][0].update(skipped={"empty": "many"}))),
    *((name, damage) for name in ("tokenizer.json", INDEX) for damage in (Path.unlink, shorten)),
])  # fmt: skip
def test_a_damaged_file_is_made_again(
    name: str, damage: Callable[[Path], Any], recipe: Recipe, finished: Path, tmp_path: Path, capsys
) -> None:
    """By the task that made it alone; only those who ask for it pay for reading all chunks."""
    out = tmp_path / "a" / "b" / "out"
    shutil.copytree(finished, out)
    damage(out / name)
    if name == TASK:  # which readers do not need, so such a folder is finished
        (out / "manifest.json").unlink()
    before = written(out)
    if verify := damage is flip:
        make(out, recipe)
        assert hashes(out) != hashes(finished)
    assert_makes(out, recipe, finished, verify=verify)
    again = {task for task, when in written(out).items() if before.get(task) != when}
    assert again == ({3} if "000003" in name else set())
    said = rf"{Path(name).name}\b.*: making again what is lost\.\n"
    assert name == TASK or re.search(said, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("change", [
    Path.unlink, lambda path: path.write_text("{"), in_record(lambda plan: plan.update(commit="../" * 13 + "x")),
])  # fmt: skip
def test_a_folder_whose_plan_is_damaged(
    change: Callable[[Path], Any], recipe: Recipe, out: Path
) -> None:
    interrupted(out, recipe, tasks=1)
    change(out / "tasks" / "plan.json")
    with pytest.raises(
        UserError, match=r"plan\.json cannot be .*: copy the folder again, or remove it and repeat"
    ):
        make(out, recipe)


@pytest.mark.parametrize("name", ["tasks", "train"])
def test_links_are_not_followed(
    name: str, recipe: Recipe, finished: Path, tmp_path: Path, out: Path
) -> None:
    """A foreign folder, with a link to where the user's own files are, that has to be mended or begun anew."""
    shutil.copytree(finished, out)
    (out / "manifest.json").unlink()
    (out / name).rename(tmp_path / "elsewhere")
    (out / name).symlink_to(tmp_path / "elsewhere")
    next(path for path in (tmp_path / "elsewhere").iterdir() if "000003" in path.name).unlink()
    before = hashes(tmp_path / "elsewhere")
    with pytest.raises(
        UserError, match=rf"{name} is a symbolic link, and nothing is written through one: remove"
    ):
        make(out, recipe)
    assert hashes(tmp_path / "elsewhere") == before


@pytest.mark.parametrize(("name", "content", "says"), [
    ("train/precious.bin", b"precious", r"is not a prepared folder, it has no manifest\.json but train: choose"),
    ("manifest.json", b'{"name": "of something else"}', r"manifest\.json is damaged"),
    (".", b"precious", "out is a file: choose a folder with --output"),
])  # fmt: skip
def test_something_else_is_not_touched(
    name: str, content: bytes, says: str, recipe: Recipe, out: Path
) -> None:
    write(out / name, content)
    before = hashes(out.parent)
    with pytest.raises(UserError, match=says):
        make(out, recipe)
    assert hashes(out.parent) == before


BPE = {"tokenizer": "bpe", "vocab_size": 300}
JSONL = {**BPE, "pattern": "*.jsonl", "text_field": "content"}


@pytest.mark.parametrize(("corpus", "wrong", "right", "says"), [
    ("FineWeb", BPE, {"val_tokens": 5}, r"too few to hold out 10,485,760 of them: set --val_tokens"),
    ("TextFiles", {**JSONL, "val_fraction": 1e-9}, {"val_fraction": 0.5}, "leaves no document for val, .*--val_fr"),
    ("TextFiles", {**JSONL, "text_field": "txt"}, JSONL, 'the field "txt" is missing or null'),
])  # fmt: skip
def test_a_wrong_option_does_not_stand_in_the_way_of_the_right_one(
    corpus: str, wrong: dict[str, Any], right: dict[str, Any], says: str, tmp_path: Path, out: Path
) -> None:
    """The first task cannot be done with it, so little is lost by beginning anew."""
    layouts.fineweb(tmp_path / "hub", ["a few words", "and some more"] * 3, n_files=1)
    layouts.json_files(tmp_path / "hub", [f"text {number}" for number in range(40)])
    with pytest.raises(UserError, match=says):
        make(out, recipe_of(corpus, tmp_path / "hub", **wrong))
    make(out, recipe_of(corpus, tmp_path / "hub", **{"val_fraction": 0.5, **wrong, **right}))


def test_a_bad_line_stops_or_is_skipped(
    tokenizer: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    """What was done before it is kept. The file is cut into parts; its line is counted from the file's beginning."""
    good = list(documents(60, seed=3))[10:]
    lines = json_lines(good)
    content = b"".join([*lines[:30], b'{"text": "x", "meta": {}}\n', *lines[30:]])
    write(tmp_path / "hub" / "train" / "chunk1" / "a.jsonl", content)
    write(tmp_path / "hub" / "validation" / "chunk1" / "a.jsonl", json_lines(["val"])[0])
    recipe = recipe_of("SlimPajama", tmp_path / "hub", SIZES, tokenizer=tokenizer)
    monkeypatch.setitem(RECIPES, "SlimPajama", recipe)
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "SlimPajama", "--output", "out", "--workers", "1"]) == 2
    *_, last = capsys.readouterr().err.strip().splitlines()
    says = 'the field "meta.redpajama_set_name" is missing or null and not a name'
    assert re.match(
        rf"anlit: error: .*hub/train/chunk1/a\.jsonl, line 31: {says}\. Repair the file, or leave",
        last,
    )
    assert last.endswith(
        "such documents out with anlit prepare's --on_bad skip; what is done so far is kept."
    )
    before = written(Path("out"))
    assert len(before) > 2
    assert main(["prepare", "SlimPajama", "--output", "out", "--on_bad", "skip"]) == 0
    assert before.items() < written(Path("out")).items()
    assert "51 documents, 1 skipped" in capsys.readouterr().err
    listed = [
        file.get("skipped_list") for record in read_records(Path("out")) for file in record["files"]
    ]
    assert [["line 31", "no_subset_field", says]] in listed
    assert_holds(Path("out"), {"train/RedPajamaC4": good, "val/RedPajamaC4": ["val"]})
