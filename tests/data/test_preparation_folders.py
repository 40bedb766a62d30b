"""A folder whose sources or settings have changed, that is damaged, or that is something else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anlit.data.preparation.recipes import Recipe, Splits
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import documents
from tests.data.preparing import (
    SIZES,
    hashes,
    interrupted,
    make,
    read_json,
    read_records,
    recipe_of,
    text_file_source,
    train_tokenizer,
    written,
)

FIRST = "plain_text/train-00000-of-00080.parquet"


@pytest.fixture
def own_hub(recipe: Recipe, place: Path, tmp_path: Path, tokenizer: str) -> Recipe:
    """The same corpus in a place where it can be changed."""
    shutil.copytree(place / "hub", tmp_path / "hub")
    return recipe_of("OpenWebText", tmp_path / "hub", SIZES, tokenizer=tokenizer, val_fraction=0.2)


@pytest.mark.parametrize("lost", [False, True])
def test_a_source_file_that_has_changed(own_hub: Recipe, finished: Path, tmp_path: Path, lost: bool) -> None:
    """Even if it keeps its length: of an unfinished folder, or of one that is mended."""
    if lost:
        make(tmp_path / "out", own_hub)
        next((tmp_path / "out" / "val").glob("chunk-*")).unlink()
    else:
        interrupted(tmp_path / "out", own_hub, tasks=1)
    file = tmp_path / "hub" / FIRST
    before = file.read_bytes()
    file.write_bytes(before.replace(b"document", b"DOCUMENT").replace(b"a", b"b"))
    with pytest.raises(UserError, match=r"train-00000-of-00080\.parquet is not what .*out was begun with: put the old"):
        make(tmp_path / "out", own_hub)
    file.write_bytes(before)
    make(tmp_path / "out", own_hub)
    assert hashes(tmp_path / "out") == hashes(finished)


def test_a_source_file_that_changes_while_it_is_read(own_hub: Recipe, finished: Path, tmp_path: Path) -> None:
    file = tmp_path / "hub" / "plain_text" / "train-00001-of-00080.parquet"
    before = file.read_bytes()

    def change(self: Splits, text: str, split: str, of_text: Callable[..., str] = Splits.of_text) -> str:
        file.write_bytes(before)
        return of_text(self, text, split)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Splits, "of_text", change)
        with pytest.raises(UserError, match=r"\.parquet was changed while it was read: repeat"):
            make(tmp_path / "out", own_hub)
    make(tmp_path / "out", own_hub)
    assert hashes(tmp_path / "out") == hashes(finished)


def test_chunks_of_a_task_that_was_given_up_do_not_stay(recipe: Recipe, finished: Path, tmp_path: Path) -> None:
    """Its source file had more documents then."""
    interrupted(tmp_path / "out", recipe, tasks=1)
    (tmp_path / "out" / "train" / "chunk-000001-007.bin").write_bytes(b"of documents that are gone")
    make(tmp_path / "out", recipe)
    assert hashes(tmp_path / "out") == hashes(finished)


def test_a_text_file_that_changes_meanwhile(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number, text in enumerate(list(documents(60, seed=3))[10:]):
        (tmp_path / "text" / f"{number}.txt").write_bytes(text.encode())
    recipe = recipe_of("TextFiles", tmp_path / "text", SIZES, tokenizer=tokenizer)
    interrupted(tmp_path / "out", recipe, tasks=3)
    file = max((tmp_path / "text").iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(UserError, match=r"The source files are not those that .*out was begun with: put the old"):
        make(tmp_path / "out", recipe_of("TextFiles", tmp_path / "text", SIZES, tokenizer=tokenizer))


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        ({"val_fraction": 0.3}, r"splits \{.*'fraction': 0.2.*\} → \{.*'fraction': 0.3"),
        ({"text_field": "content"}, "text_field text → content"),
        ({"tokenizer": "bpe"}, "vocab_size None → 4096"),
    ],
)
def test_other_settings_are_refused(
    options: dict[str, Any], differs: str, recipe: Recipe, finished: Path, place: Path, tokenizer: str, tmp_path: Path
) -> None:
    other = recipe_of("OpenWebText", place / "hub", SIZES, **{"tokenizer": tokenizer, "val_fraction": 0.2, **options})
    interrupted(tmp_path / "out", recipe, tasks=2)
    for folder, how in ((finished, "was prepared"), (tmp_path / "out", "was begun")):
        before = hashes(folder)
        with pytest.raises(UserError, match=f"{how} with other settings or files .*{differs}.*: remove the folder"):
            make(folder, other)
        assert hashes(folder) == before
    make(tmp_path / "out", recipe)
    assert hashes(tmp_path / "out") == hashes(finished)


def test_another_corpus_and_another_tokenizer_file_are_refused(
    finished: Path, recipe: Recipe, place: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="corpus OpenWebText → FineWeb"):
        make(finished, recipe_of("FineWeb", place / "hub", SIZES, tokenizer=recipe.tokenizer))
    other = str(train_tokenizer(tmp_path / "other.json", 300))
    with pytest.raises(UserError, match=r"tokenizer sha256:\w+ → sha256:\w+"):
        make(finished, recipe_of("OpenWebText", place / "hub", SIZES, tokenizer=other, val_fraction=0.2))
    moved = shutil.copy(recipe.tokenizer, tmp_path / "moved.json")  # the same file elsewhere is the same
    make(finished, recipe_of("OpenWebText", place / "hub", SIZES, tokenizer=str(moved), val_fraction=0.2))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": flip,
    "not JSON": lambda path: path.write_text("{"),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("train/chunk-000003-000.bin", kind) for kind in ("missing", "short", "flipped")),
     ("tasks/000003.json", "missing"), ("tasks/000003.json", "not JSON"), ("tokenizer.json", "missing"),
     ("train/index.json", "flipped")],
)  # fmt: skip
def test_a_damaged_file_is_made_again(
    name: str, kind: str, recipe: Recipe, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the task that made it alone; only those who ask for it pay for reading all chunks."""
    shutil.copytree(finished, tmp_path / "out")
    DAMAGE[kind](tmp_path / "out" / name)
    before = written(tmp_path / "out")
    if verify := name.endswith(".bin") and kind == "flipped":
        make(tmp_path / "out", recipe)
        assert hashes(tmp_path / "out") != hashes(finished)
    make(tmp_path / "out", recipe, verify=verify)
    assert hashes(tmp_path / "out") == hashes(finished)
    again = {task for task, when in written(tmp_path / "out").items() if before.get(task) != when}
    assert again == ({3} if "000003" in name else set())
    assert f"{name} is missing or damaged" in capsys.readouterr().err


@pytest.mark.parametrize("stream", ["../../out", "/etc", "train/../../out"])
def test_a_record_that_leads_elsewhere_is_none(stream: str, recipe: Recipe, finished: Path, tmp_path: Path) -> None:
    """No path comes out of a folder's own files: the task is done again."""
    folder = tmp_path / "a" / "b" / "out"
    shutil.copytree(finished, folder)
    path = folder / "tasks" / "000003.json"
    record = read_json(path)
    record["streams"][stream] = record["streams"].pop("train")
    path.write_text(json.dumps(record))
    make(folder, recipe)
    assert hashes(folder) == hashes(finished)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "change",
    [Path.unlink, lambda path: path.write_text("{"),
     lambda path: path.write_text(json.dumps({**read_json(path), "commit": "../" * 13 + "x"}))],
)  # fmt: skip
def test_a_folder_that_does_not_know_what_it_is_made_of(
    change: Callable[[Path], Any], recipe: Recipe, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    change(tmp_path / "out" / "tasks" / "plan.json")
    with pytest.raises(UserError, match=r"plan\.json is missing or damaged: copy the folder again, or remove it"):
        make(tmp_path / "out", recipe)


@pytest.mark.parametrize("name", ["tasks", "train"])
def test_links_are_not_followed(name: str, recipe: Recipe, finished: Path, tmp_path: Path) -> None:
    """A foreign folder, with a link to where the user's own files are, that has to be mended or begun anew."""
    shutil.copytree(finished, tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    (tmp_path / "out" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "out" / name).symlink_to(tmp_path / "elsewhere")
    next(path for path in (tmp_path / "elsewhere").iterdir() if "000003" in path.name).unlink()
    before = hashes(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=rf"{name} is a symbolic link, and nothing is written through one: remove"):
        make(tmp_path / "out", recipe)
    assert hashes(tmp_path / "elsewhere") == before


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


def test_options_that_leave_a_split_empty(tmp_path: Path) -> None:
    layouts.fineweb(tmp_path / "hub", ["a few words", "and some more"] * 3, n_files=1)
    options = {"tokenizer": "bpe", "vocab_size": 300}
    with pytest.raises(UserError, match=r"too few to hold out 10,485,760 of them: set --val_tokens"):
        make(tmp_path / "out", recipe_of("FineWeb", tmp_path / "hub", **options))
    make(tmp_path / "out", recipe_of("FineWeb", tmp_path / "hub", val_tokens=5, **options))
    options |= {"pattern": "*.jsonl", "text_field": "content"}
    text_file_source(tmp_path / "text", [f"text {number}" for number in range(40)], ".jsonl")
    with pytest.raises(UserError, match=r"leaves no document for val, .*--val_fraction"):
        make(tmp_path / "other", recipe_of("TextFiles", tmp_path / "text", val_fraction=1e-9, **options))
    make(tmp_path / "other", recipe_of("TextFiles", tmp_path / "text", val_fraction=0.5, **options))


@pytest.mark.parametrize(
    ("corpus", "options", "says"),
    [
        ("OpenWebText", {"tokenizer": "nosuch.json"}, r"There is no tokenizer at nosuch\.json"),
        ("OpenWebText", {"end_of_document": "<eos>"}, 'has no token "<eos>"'),
        ("TextFiles", {"pattern": "**/*.parquet", "text_field": "txt"}, 'the file: there is no column "txt"'),
    ],
)
def test_a_wrong_option_does_not_stand_in_the_way_of_the_right_one(
    corpus: str, options: dict[str, Any], says: str, recipe: Recipe, finished: Path, place: Path, tokenizer: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    """The first task cannot be done with it, so little is lost by beginning anew."""
    wrong = recipe_of(corpus, place / "hub", SIZES, **{"tokenizer": tokenizer, "val_fraction": 0.2, **options})
    with pytest.raises(UserError, match=says):
        make(tmp_path / "out", wrong)
    make(tmp_path / "out", recipe)
    assert hashes(tmp_path / "out") == hashes(finished)


def test_a_large_file_is_shared_by_workers(tokenizer: str, tmp_path: Path) -> None:
    """One of JSON lines: its parts are tasks of their own."""
    (tmp_path / "text").mkdir()
    texts = [f"text {number}" for number in range(3000)]
    (tmp_path / "text" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = recipe_of("TextFiles", tmp_path / "text", SIZES, pattern="*.jsonl", tokenizer=tokenizer, val_fraction=0.1)
    manifest = make(tmp_path / "out", recipe, workers=2)
    assert (manifest["files"], manifest["tasks"]) == (1, (tmp_path / "text" / "a.jsonl").stat().st_size // 6000)
    sizes = [record["files"][0]["documents"] for record in read_records(tmp_path / "out")]
    assert sum(sizes) == 3000
    assert max(sizes) < 1.3 * min(sizes)
