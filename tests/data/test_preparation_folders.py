"""A folder whose sources or settings have changed, that is damaged, or that is something else."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anlit.data.preparation import runner as run_module
from anlit.data.preparation.encode import encode_task
from anlit.data.preparation.recipe import Recipe
from anlit.data.preparation.runner import Runner
from anlit.data.preparation.workspace import Workspace
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import documents
from tests.data.preparing import (
    SIZES,
    counted,
    hashes,
    interrupted,
    make,
    recipe_of,
    text_file_source,
    train_tokenizer,
)


def interrupted_after_a_group(folder: Path, recipe: Recipe) -> None:
    """Begin a preparation and leave it when its first group is done: that is worth keeping."""

    def finish_group(runner: Any, group: Any, pending: Any, original: Any = Runner._finish) -> None:
        original(runner, group, pending)
        if group.number == 0:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "_finish", finish_group)
        with pytest.raises(KeyboardInterrupt):
            make(folder, recipe)


@pytest.fixture
def own_hub(recipe: Recipe, place: Path, tmp_path: Path, tokenizer: str) -> Recipe:
    """The same corpus in a place where it can be changed."""
    shutil.copytree(place / "hub", tmp_path / "hub")
    return recipe_of("OpenWebText", tmp_path / "hub", SIZES, tokenizer=tokenizer, val_fraction=0.2)


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


def test_a_source_file_that_changes_while_it_is_read(own_hub: Recipe, finished: Path, tmp_path: Path) -> None:
    """Its hash was taken before, and the shards would hold something else."""
    file = tmp_path / "hub" / "plain_text" / "train-00001-of-00080.parquet"
    before = file.read_bytes()

    def encode(job: Any, task: Any) -> dict[str, Any]:
        if any(piece.path == file for piece in task.pieces):
            file.write_bytes(before.replace(b"document", b"DOCUMENT"))
        return encode_task(job, task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "encode_task", encode)
        with pytest.raises(UserError, match=r"train-00001-of-00080\.parquet was changed while it was read: repeat"):
            make(tmp_path / "out", own_hub)
    file.write_bytes(before)
    make(tmp_path / "out", own_hub)
    assert hashes(tmp_path / "out") == hashes(finished)


def test_chunks_of_a_task_that_was_given_up_do_not_stay(recipe: Recipe, finished: Path, tmp_path: Path) -> None:
    """Its source file had more documents then."""
    interrupted(tmp_path / "out", recipe, tasks=1)
    (tmp_path / "out" / "train" / "chunk-000000-00001-007.bin").write_bytes(b"of documents that are gone")
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
    with pytest.raises(UserError, match=r"\.txt has changed since the preparation began"):
        make(tmp_path / "out", recipe_of("TextFiles", tmp_path / "text", SIZES, tokenizer=tokenizer))


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        ({"val_fraction": 0.3}, r"splits \{.*'fraction': 0.2.*\} → \{.*'fraction': 0.3"),
        ({"text": "content"}, "text text → content"),
        ({"tokenizer": "bpe"}, "vocab_size None → 4096"),
    ],
)
def test_other_settings_are_refused(
    options: dict[str, Any], differs: str, recipe: Recipe, finished: Path, place: Path, tokenizer: str, tmp_path: Path
) -> None:
    other = recipe_of("OpenWebText", place / "hub", SIZES, **{"tokenizer": tokenizer, "val_fraction": 0.2, **options})
    before = hashes(finished)
    with pytest.raises(UserError, match=f"finished was prepared with other settings or files .*{differs}.*: remove"):
        make(finished, other)
    assert hashes(finished) == before
    interrupted_after_a_group(tmp_path / "out", recipe)
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
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("train/chunk-000001-00000-000.bin", kind) for kind in DAMAGE), ("tokenizer.json", "missing"),
     ("train/index.json", "flipped")],
)  # fmt: skip
def test_a_damaged_file_is_made_again(
    name: str, kind: str, recipe: Recipe, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Of a chunk those tasks that made it; only those who ask for it pay for reading all chunks."""
    shutil.copytree(finished, tmp_path / "out")
    DAMAGE[kind](tmp_path / "out" / name)
    tasks, is_chunk = counted(monkeypatch), name.endswith(".bin")
    if is_chunk and kind == "flipped":
        make(tmp_path / "out", recipe)
        assert hashes(tmp_path / "out") != hashes(finished)
        assert tasks == []
    make(tmp_path / "out", recipe, verify=is_chunk and kind == "flipped")
    assert {group for group, _ in tasks} == ({1} if is_chunk else set())
    assert hashes(tmp_path / "out") == hashes(finished)
    assert not is_chunk or f"{name} is missing or damaged" in capsys.readouterr().err


def test_what_a_killed_process_left_is_not_taken_for_what_is_missing_now(
    recipe: Recipe, finished: Path, tmp_path: Path
) -> None:
    """Killed when all but cleaning up was done: there are records of groups whose chunks are lost later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "remove", lambda self: None)
        make(tmp_path / "out", recipe)
    assert (tmp_path / "out" / ".work" / "groups" / "000001.json").is_file()
    (tmp_path / "out" / "train" / "chunk-000001-00000-000.bin").unlink()
    make(tmp_path / "out", recipe)
    assert hashes(tmp_path / "out") == hashes(finished)


def test_a_damaged_folder_whose_sources_have_changed(own_hub: Recipe, tmp_path: Path) -> None:
    """Other documents would take the places of those that the other splits, chunks and the manifest know."""
    make(tmp_path / "out", own_hub)
    before = hashes(tmp_path / "out")
    file = tmp_path / "hub" / "plain_text" / "train-00000-of-00080.parquet"
    content = file.read_bytes()
    (tmp_path / "out" / "val" / "chunk-000000-00000-000.bin").unlink()
    file.write_bytes(content.replace(b"a", b"b"))
    with pytest.raises(UserError, match=r"train-00000-of-00080\.parquet is not what .*out was begun with"):
        make(tmp_path / "out", own_hub)
    file.write_bytes(content)
    make(tmp_path / "out", own_hub)
    assert hashes(tmp_path / "out") == before


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text("{")])
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


def test_options_that_leave_a_split_empty(recipe: Recipe, finished: Path, place: Path, tmp_path: Path) -> None:
    layouts.fineweb(tmp_path / "hub", ["a few words", "and some more"] * 3, n_files=1)
    options = {"tokenizer": "bpe", "vocab_size": 300}
    with pytest.raises(UserError, match=r"too few to hold out 10,485,760 of them: set --val_tokens"):
        make(tmp_path / "out", recipe_of("FineWeb", tmp_path / "hub", **options))
    make(tmp_path / "out", recipe_of("FineWeb", tmp_path / "hub", val_tokens=5, **options))
    options |= {"pattern": "*.jsonl", "text": "content"}
    text_file_source(tmp_path / "text", [f"text {number}" for number in range(40)], ".jsonl")
    with pytest.raises(UserError, match=r"leaves no document for val, .*--val_fraction"):
        make(tmp_path / "other", recipe_of("TextFiles", tmp_path / "text", val_fraction=1e-9, **options))
    make(tmp_path / "other", recipe_of("TextFiles", tmp_path / "text", val_fraction=0.5, **options))


def test_what_is_at_work_is_not_begun_anew(recipe: Recipe, place: Path, tokenizer: str, tmp_path: Path) -> None:
    interrupted(tmp_path / "out", recipe, tasks=1)
    other = recipe_of("OpenWebText", place / "hub", SIZES, tokenizer=tokenizer, val_fraction=0.3)
    with (
        Workspace(tmp_path / "out").shard_lock(1, 2),
        pytest.raises(UserError, match="was begun with other settings or files"),
    ):
        make(tmp_path / "out", other, shard=0, shards=2)
    make(tmp_path / "out", other)


@pytest.mark.parametrize(
    ("corpus", "options", "says"),
    [
        ("OpenWebText", {"tokenizer": "nosuch.json"}, r"There is no tokenizer at nosuch\.json"),
        ("OpenWebText", {"end_of_document": "<eos>"}, 'has no token "<eos>"'),
        ("TextFiles", {"pattern": "**/*.parquet", "text": "txt"}, 'the file: there is no column "txt"'),
    ],
)
def test_a_wrong_option_does_not_stand_in_the_way_of_the_right_one(
    corpus: str, options: dict[str, Any], says: str, recipe: Recipe, finished: Path, place: Path, tokenizer: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    """The first group cannot be made with it, so nothing is lost by beginning anew."""
    wrong = recipe_of(corpus, place / "hub", SIZES, **{"tokenizer": tokenizer, "val_fraction": 0.2, **options})
    with pytest.raises(UserError, match=says):
        make(tmp_path / "out", wrong)
    make(tmp_path / "out", recipe)
    assert hashes(tmp_path / "out") == hashes(finished)
