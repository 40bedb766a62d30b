"""From text files to shards: nothing is lost, mixed, guessed or left half done."""

import functools
import json
import multiprocessing
import os
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from anlit.data import PythonSources, TextFiles, TokenShards
from anlit.data import corpus as corpora
from anlit.data import prepare as prepare_module
from anlit.data.loader import open_split
from anlit.data.python_sources import python_files
from anlit.data.shards import chunks_of
from anlit.data.tokenizer import load_tokenizer, train_bpe
from anlit.errors import UserError
from tests.data.conftest import write_corpus


def tiny(text: Path, path: Path | str, **changes) -> TextFiles:
    return TextFiles(str(text), str(path), **{"vocab_size": 320, "val_fraction": 0.2, **changes})


@functools.cache
def split_tokens(path: str, split: str) -> np.ndarray:
    """All tokens of a split, in order, through litdata: blocks of one token lose nothing."""
    dataset = open_split(path, split, block_size=1, shuffle=False, seed=0, drop_last=False)
    return np.concatenate([np.asarray(block) for block in dataset])


def documents_in(path: str, split: str) -> list[str]:
    """The texts between the end-of-document tokens of a split."""
    tokens, tokenizer = split_tokens(path, split), load_tokenizer(f"{path}/tokenizer.json")
    assert tokens[-1] == 0
    ends = np.flatnonzero(tokens == 0)
    return [tokenizer.decode(part[part != 0].tolist()) for part in np.split(tokens, ends[:-1] + 1)]


def source_texts(text: Path) -> set[str]:
    contents = {path.read_bytes() for path in text.rglob("*.txt")} - {b"", "größe".encode("latin-1")}
    return {content.decode() for content in contents}


def all_bytes(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_shards_decode_to_every_document_once(tiny_text: Path, tiny_shards: str) -> None:
    train, val = documents_in(tiny_shards, "train"), documents_in(tiny_shards, "val")
    assert set(train) | set(val) == source_texts(tiny_text)
    assert len(train) + len(val) == len(source_texts(tiny_text))
    assert set(train).isdisjoint(val)
    assert any("<|endoftext|>" in text for text in train + val)


def test_manifest_counts_what_is_there(tiny_text: Path, tiny_shards: str) -> None:
    manifest = TokenShards(tiny_shards).manifest
    tokenizer = load_tokenizer(f"{tiny_shards}/tokenizer.json")
    for split in ("train", "val"):
        texts = documents_in(tiny_shards, split)
        stored = split_tokens(tiny_shards, split)
        assert stored.dtype == np.uint16
        assert manifest[split]["documents"] == len(texts)
        assert manifest[split]["bytes"] == sum(len(text.encode()) for text in texts)
        assert manifest[split]["tokens"] == len(stored)
        assert manifest[split]["tokens"] == sum(len(tokenizer.encode(text).ids) + 1 for text in texts)
    assert manifest["tokens"] == manifest["train"]["tokens"] + manifest["val"]["tokens"]
    assert manifest["vocab_size"] == 320
    skipped = {reason: entry["files"] for reason, entry in manifest["skipped"].items()}
    assert skipped == {
        "unreadable": [], "not_utf8": ["latin1.txt"], "empty": ["empty.txt"], "duplicate": ["special.txt"],
    }  # fmt: skip


def test_tokenizer_has_seen_the_training_part_only(tiny_shards: str) -> None:
    by_hash = sorted(documents_in(tiny_shards, "train"), key=lambda text: sha256(text.encode()).digest())
    stored = load_tokenizer(f"{tiny_shards}/tokenizer.json").to_str()
    assert train_bpe(by_hash, 320).to_str() == stored
    assert train_bpe(by_hash + documents_in(tiny_shards, "val"), 320).to_str() != stored


def test_side_of_a_document_depends_on_its_content_only(tiny_text: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    for index, file in enumerate(sorted(tiny_text.rglob("*.txt"), reverse=True)[:40]):
        moved.mkdir(exist_ok=True)
        shutil.copyfile(file, moved / f"renamed{index}.txt")
    first = corpora.collect(corpora.list_files(tiny_text, "**/*.txt"), 0.2)
    second = corpora.collect(corpora.list_files(moved, "**/*.txt"), 0.2)
    train, val = ({document.sha256 for document in part} for part in (first.train, first.val))
    assert 0 < len(second.val) < len(val)
    assert {document.sha256 for document in second.val} <= val
    assert {document.sha256 for document in second.train} <= train


def test_same_text_gives_the_same_bytes_with_one_and_two_workers(
    tiny_text: Path, tiny_shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(tiny_text, tmp_path / "again").prepare_data()
    assert all_bytes(tmp_path / "again") == all_bytes(Path(tiny_shards))
    monkeypatch.setattr(prepare_module, "TASK_BYTES", 20_000)
    monkeypatch.setattr(prepare_module, "WORKER_BYTES", 100_000)
    for name in ("two", "two_again"):
        tiny(tiny_text, tmp_path / name).prepare_data()
    assert {chunk["filename"][:7] for chunk in chunks_of(str(tmp_path / "two"), "train")} == {"chunk-0", "chunk-1"}
    assert all_bytes(tmp_path / "two") == all_bytes(tmp_path / "two_again")
    assert documents_in(str(tmp_path / "two"), "train") == documents_in(tiny_shards, "train")


def test_a_prepared_folder_is_reused(tiny_text: Path, tiny_shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "_build", None)  # building again would fail
    tiny(tiny_text, tiny_shards).prepare_data()


def test_other_settings_or_texts_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for index in range(4):
        (text / f"{index}.txt").write_text(f"text number {index} " * 30)
    path = tmp_path / "shards"
    tiny(text, path, vocab_size=280).prepare_data()
    with pytest.raises(UserError, match=r"shards was prepared with other settings .*vocab_size 280 → 281"):
        tiny(text, path, vocab_size=281).prepare_data()
    (text / "new.txt").write_text("one more")
    with pytest.raises(UserError, match="listing_sha256"):
        tiny(text, path, vocab_size=280).prepare_data()
    shutil.rmtree(text)
    tiny(text, path, vocab_size=280).prepare_data()  # moved to where the texts are not: nothing to compare


def test_a_killed_preparation_leaves_no_folder(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shards"
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_write_split", lambda *args: os._exit(9))
        child = os.fork()
        if child == 0:
            prepare_module.prepare(path, recipe_of(tiny_text))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not path.exists()
    assert len(list(tmp_path.glob(".shards.preparing-*"))) == 1
    tiny(tiny_text, path).prepare_data()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["shards"]


def test_a_text_that_changes_meanwhile_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = write_corpus(tmp_path / "text", n_files=4)
    write_split = prepare_module._write_split

    def change_first(folder: Path, split: str, documents: list[corpora.Document], end_id: int) -> dict[str, int]:
        documents[0].path.write_text("something else")
        return write_split(folder, split, documents, end_id)

    monkeypatch.setattr(prepare_module, "_write_split", change_first)
    with pytest.raises(UserError, match="has changed since the preparation began"):
        tiny(text, tmp_path / "shards").prepare_data()
    assert multiprocessing.active_children() == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["text"]


def recipe_of(text: Path) -> prepare_module.Recipe:
    return prepare_module.Recipe("text:text", corpora.list_files(text, "**/*.txt"), vocab_size=320)


def test_a_quicker_process_wins(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, build = tmp_path / "shards", prepare_module._build

    def build_while_another_finishes(folder: Path, recipe: prepare_module.Recipe) -> dict:
        manifest = build(folder, recipe)
        shutil.copytree(folder, path)
        return manifest

    monkeypatch.setattr(prepare_module, "_build", build_while_another_finishes)
    manifest = prepare_module.prepare(path, recipe_of(tiny_text))
    assert manifest == json.loads((path / "manifest.json").read_text())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["shards"]


def test_a_given_tokenizer_is_used_as_it_is(tiny_text: Path, tiny_shards: str, tmp_path: Path) -> None:
    given = tmp_path / "mine.json"
    train_bpe(["another text altogether " * 50], 270).save(str(given))
    data = tiny(tiny_text, tmp_path / "shards", tokenizer=str(given))
    data.prepare_data()
    assert (tmp_path / "shards" / "tokenizer.json").read_bytes() == given.read_bytes()
    assert data.vocab_size == load_tokenizer(given).get_vocab_size()
    assert set(documents_in(data.path, "train")) == set(documents_in(tiny_shards, "train"))


def test_empty_and_single_file_corpora_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"No file matches \*\*/\*\.txt in .*nowhere"):
        tiny(tmp_path / "nowhere", tmp_path / "shards").prepare_data()
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_text("alone")
    with pytest.raises(UserError, match="1 different non-empty UTF-8 file"):
        tiny(tmp_path / "one", tmp_path / "shards").prepare_data()
    assert not (tmp_path / "shards").exists()


def test_a_foreign_folder_is_not_overwritten(tiny_text: Path, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="shards is not a prepared folder"):
        tiny(tiny_text, tmp_path / "shards").prepare_data()
    assert (tmp_path / "shards" / "mine.txt").read_text() == "precious"


def test_python_sources_are_the_standard_library() -> None:
    labels = {file.label for file in python_files(include_site_packages=False)}
    assert {"abc.py", "json/decoder.py", "asyncio/base_events.py"} <= labels


def test_site_packages_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, packages = tmp_path / "lib", tmp_path / "lib" / "site-packages"
    packages.mkdir(parents=True)
    (library / "a.py").write_text("a = 1\n")
    (packages / "b.py").write_text("b = 2\n")
    paths = {"stdlib": str(library), "purelib": str(packages), "platlib": str(packages)}
    monkeypatch.setattr("sysconfig.get_paths", lambda: paths)
    assert [file.path.name for file in python_files(include_site_packages=False)] == ["a.py"]
    assert [file.path.name for file in python_files(include_site_packages=True)] == ["a.py", "b.py"]


def test_python_sources_prepare_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [file for file in python_files(include_site_packages=False) if file.label.startswith("json/")]
    monkeypatch.setattr("anlit.data.python_sources.python_files", lambda include_site_packages: few)
    data = PythonSources(str(tmp_path / "python"), vocab_size=300, val_fraction=0.3)
    data.prepare_data()
    texts = documents_in(data.path, "train") + documents_in(data.path, "val")
    assert sorted(texts) == sorted(file.path.read_bytes().decode() for file in few)
    assert data.manifest["settings"]["include_site_packages"] is False
    with pytest.raises(UserError, match="include_site_packages False → True"):
        PythonSources(data.path, True, vocab_size=300, val_fraction=0.3).prepare_data()
