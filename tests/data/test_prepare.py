"""From each corpus's files, in the hub's layout, to shards: nothing is lost, mixed or guessed."""

import functools
import json
import random
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from anlit.data.preparation import recipes
from anlit.data.preparation.prepare import RunOptions, prepare
from anlit.data.preparation.recipes import Options, python_files, python_sources
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import GPT2_END_OF_DOCUMENT, SET_NAMES, documents
from tests.data.preparing import (
    assert_counts,
    assert_holds,
    cut,
    hashes,
    make,
    plain_tokenizer,
    read_files,
    read_json,
    read_records,
    read_stream,
    read_texts,
    recipe_of,
    write_texts,
)

BIG = {"task_bytes": 1 << 20, "chunk_bytes": 1 << 20}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Unicode of all kinds, and one document of more than a megabyte."""
    return list(documents(70))


def slimpajama_streams(texts_by_folder: dict[str, list[str]]) -> dict[str, list[str]]:
    """What each stream is to hold."""
    streams: dict[str, list[str]] = {}
    for folder, texts in texts_by_folder.items():
        for number, text in enumerate(texts):
            split = {"validation": "val"}.get(folder, folder)
            streams.setdefault(f"{split}/{SET_NAMES[number % 7]}", []).append(text)
    return streams


def assert_lists_sources(folder: Path, root: Path, files: Sequence[Path], texts_of_files: Sequence[list[str]]) -> None:
    """The records have every source file with its hash, and its own counts."""
    tokenizer = plain_tokenizer(folder / "tokenizer.json")
    listed = read_files(folder)
    assert set(listed) == {file.relative_to(root).as_posix() for file in files}
    for file, texts in zip(files, texts_of_files, strict=True):
        name = file.relative_to(root).as_posix()
        assert listed[name] == {
            "name": name,
            "sha256": sha256(file.read_bytes()).hexdigest(),
            "documents": len(texts),
            "bytes": sum(len(text.encode()) for text in texts),
            "tokens": len(tokenizer.tokens(texts)),
        }


def test_slimpajama(texts: list[str], tokenizer: str, tmp_path: Path) -> None:
    by_folder = {"train": texts[:50], "validation": texts[50:61], "test": texts[61:]}
    files = layouts.slimpajama(tmp_path / "hub", by_folder, n_files=3)
    manifest = make(tmp_path / "out", recipe_of("SlimPajama", tmp_path / "hub", BIG, tokenizer=tokenizer))
    assert_holds(tmp_path / "out", slimpajama_streams(by_folder))
    parts = [part for folder in by_folder.values() for part in cut(folder, 3)]
    assert_lists_sources(tmp_path / "out", tmp_path / "hub", files, parts)
    assert set(manifest["train"]["subsets"]) == set(SET_NAMES)
    assert manifest == read_json(tmp_path / "out" / "manifest.json")
    assert manifest["splits"] == ["train", "val", "test"]
    assert manifest["skipped"] == {}
    assert (manifest["corpus"], manifest["command"], manifest["dtype"]) == ("SlimPajama", "anlit prepare", "uint16")
    assert (manifest["vocab_size"], manifest["end_of_document"]) == (800, 799)
    assert manifest["document_token_at"] == "end"
    assert manifest["tokenizer_sha256"] == sha256(Path(tokenizer).read_bytes()).hexdigest()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == Path(tokenizer).read_bytes()
    assert {"python", "anlit", "tokenizers"} <= set(manifest["versions"])


def test_slimpajama_unpacked_and_with_files_in_the_order_of_their_numbers(tokenizer: str, tmp_path: Path) -> None:
    expected = []
    for chunk in (1, 2, 10):
        for number in (0, 9, 10, 100):
            expected.append(f"{chunk}/{number}")
            path = tmp_path / "hub" / "train" / f"chunk{chunk}" / f"example_train_{number}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"text": expected[-1], "meta": {"redpajama_set_name": "RedPajamaC4"}}))
    val = tmp_path / "hub" / "validation" / "chunk1" / "example_holdout_0.jsonl"
    val.parent.mkdir(parents=True)
    val.write_text(json.dumps({"text": "val", "meta": {"redpajama_set_name": "RedPajamaC4"}}))
    make(tmp_path / "out", recipe_of("SlimPajama", tmp_path / "hub", tokenizer=tokenizer))
    assert_holds(tmp_path / "out", {"train/RedPajamaC4": expected, "val/RedPajamaC4": ["val"]})


def test_the_name_of_a_subset_cannot_lead_out_of_the_folder(tokenizer: str, tmp_path: Path) -> None:
    names = ["../../mine", "..", ".", "a b", "größe", "a/b"]
    rows = [json.dumps({"text": name, "meta": {"redpajama_set_name": name}}) + "\n" for name in names]
    for folder in ("train", "validation"):
        (tmp_path / "hub" / folder).mkdir(parents=True)
        (tmp_path / "hub" / folder / "a.jsonl").write_text("".join(rows))
    make(tmp_path / "out", recipe_of("SlimPajama", tmp_path / "hub", tokenizer=tokenizer))
    assert {path.name for path in tmp_path.iterdir()} == {"hub", "out"}
    subsets = read_json(tmp_path / "out" / "manifest.json")["train"]["subsets"]
    assert {path.name for path in (tmp_path / "out" / "train").iterdir()} == set(subsets)
    found = [text for name in subsets for text in read_texts(tmp_path / "out", f"train/{name}")]
    assert sorted(found) == sorted(names)


def is_held_out(text: str, fraction: float) -> bool:
    return int(sha256(text.encode()).hexdigest()[:8], 16) < fraction * 2**32


def test_openwebtext(texts: list[str], tokenizer: str, tmp_path: Path) -> None:
    """Every text twice, in other files: its hash puts both on the same side."""
    files = layouts.openwebtext(tmp_path / "hub", texts * 2, n_files=3)
    make(tmp_path / "out", recipe_of("OpenWebText", tmp_path / "hub", BIG, tokenizer=tokenizer, val_fraction=0.2), 2)
    val = [text for text in texts * 2 if is_held_out(text, 0.2)]
    assert 0 < len(val) < len(texts)
    assert_holds(tmp_path / "out", {"train": [text for text in texts * 2 if text not in val], "val": val})
    assert_lists_sources(tmp_path / "out", tmp_path / "hub", files, cut(texts * 2, 3))
    of_papers = recipe_of("OpenWebText", tmp_path / "hub").splits.fraction
    assert round(8_013_769 * of_papers) == 10_000  # the documents in the corpus, and those that are held out


@pytest.mark.parametrize("past_the_end", [-1, 0, 1])
def test_fineweb_s_cut_at_the_end_of_a_document(tokenizer: str, tmp_path: Path, past_the_end: int) -> None:
    some = list(documents(60, seed=4))[10:]
    layouts.fineweb(tmp_path / "hub", some, n_files=4)
    end = len(plain_tokenizer(tokenizer).tokens(some[:5]))  # in the first task
    recipe = recipe_of("FineWeb", tmp_path / "hub", tokenizer=tokenizer, val_tokens=end + past_the_end)
    make(tmp_path / "out", recipe)
    held_out = 6 if past_the_end > 0 else 5
    assert_holds(tmp_path / "out", {"val": some[:held_out], "train": some[held_out:]})
    assert len(read_records(tmp_path / "out")) > 1


def test_fineweb_s_part_decides_on_the_files(tokenizer: str, tmp_path: Path) -> None:
    layouts.fineweb(tmp_path / "hub", ["small"] * 3, n_files=1)
    layouts.fineweb(tmp_path / "hub", ["big"] * 4, n_files=1, sample="100BT")
    for part, texts in (("sample-10BT", ["small"] * 3), ("sample-100BT", ["big"] * 4)):
        recipe = recipe_of("FineWeb", tmp_path / "hub", tokenizer=tokenizer, val_tokens=1, part=part)
        make(tmp_path / part, recipe)
        assert_holds(tmp_path / part, {"val": texts[:1], "train": texts[1:]})
    with pytest.raises(UserError, match="--part sample-1BT is not known: choose one of sample-10BT"):
        recipe_of("FineWeb", tmp_path / "hub", part="sample-1BT")


def random_token_documents(n: int, vocabulary: int = GPT2_END_OF_DOCUMENT) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocabulary) for _ in range(rng.randrange(1, 200))] for _ in range(n)]


def bin_tokens(file: Path) -> list[int]:
    return np.frombuffer(file.read_bytes(), "<u2")[512:].tolist()


def test_fineweb_bin(tmp_path: Path) -> None:
    files = layouts.fineweb_bin(tmp_path / "hub", random_token_documents(100), tokens_per_file=2500)
    assert len(files) > 3
    sizes = {"task_bytes": 2500, "chunk_bytes": 1000}
    manifest = make(tmp_path / "out", recipe_of("FineWebBin", tmp_path / "hub", sizes, tokenizer="none"), 2)
    expected = {"val": bin_tokens(files[0]), "train": [token for file in files[1:] for token in bin_tokens(file)]}
    counts = {}
    for split, tokens in expected.items():
        assert read_stream(tmp_path / "out", split).tolist() == tokens
        n_documents = tokens.count(GPT2_END_OF_DOCUMENT)
        chunks = manifest[split]["chunks"]
        counts[split] = {"documents": n_documents, "bytes": 0, "tokens": len(tokens), "chunks": chunks}
    for place in (manifest, manifest["train"], manifest["val"]):
        assert place["bytes"] is None  # their text is not known
        place["bytes"] = 0
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    assert_counts(tmp_path / "out", counts)
    assert counts["val"]["documents"] + counts["train"]["documents"] == 100
    assert (manifest["vocab_size"], manifest["end_of_document"]) == (50257, GPT2_END_OF_DOCUMENT)
    assert (manifest["document_token_at"], manifest["tokenizer_sha256"]) == ("start", None)
    assert set(read_files(tmp_path / "out")) == {file.name for file in files}


def test_fineweb_bin_with_the_tokenizer_that_made_it(tokenizer: str, tmp_path: Path) -> None:
    layouts.fineweb_bin(tmp_path / "hub", random_token_documents(20, 799), tokens_per_file=900)
    for file in (tmp_path / "hub").iterdir():  # the end of a document is 799 for this tokenizer
        content = np.frombuffer(file.read_bytes(), "<u2").copy()
        content[512:][content[512:] == GPT2_END_OF_DOCUMENT] = 799
        file.write_bytes(content.tobytes())
    manifest = make(tmp_path / "out", recipe_of("FineWebBin", tmp_path / "hub", tokenizer=tokenizer))
    assert (manifest["documents"], manifest["vocab_size"], manifest["end_of_document"]) == (20, 800, 799)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == Path(tokenizer).read_bytes()


def test_tokens_that_the_vocabulary_does_not_have_are_refused(tokenizer: str, tmp_path: Path) -> None:
    layouts.fineweb_bin(tmp_path / "hub", [[1, 2], [50257]], tokens_per_file=3)
    with pytest.raises(UserError, match=r"fineweb_train_000001\.bin holds token 50257, and the vocabulary has 50257"):
        make(tmp_path / "out", recipe_of("FineWebBin", tmp_path / "hub", tokenizer="none"))
    with pytest.raises(UserError, match=r"holds token 50257, and the vocabulary has 800.*--tokenizer"):
        make(tmp_path / "other", recipe_of("FineWebBin", tmp_path / "hub", tokenizer=tokenizer))


def by_content(texts: list[str]) -> list[str]:
    return sorted(texts, key=lambda text: sha256(text.encode()).hexdigest())


def test_text_files(texts: list[str], tokenizer: str, tmp_path: Path) -> None:
    recipe = recipe_of("TextFiles", write_texts(tmp_path / "text", texts), BIG, tokenizer=tokenizer, val_fraction=0.2)
    manifest = make(tmp_path / "out", recipe)
    val = [text for text in by_content(texts) if is_held_out(text, 0.2)]
    train = [text for text in by_content(texts) if text not in val]
    assert_holds(tmp_path / "out", {"val": val, "train": train})
    assert manifest["skipped"] == {
        "duplicate": {"count": 1, "listed": ["part0/0.txt"]},
        "empty": {"count": 1, "listed": ["empty.txt"]},
        "not_utf8": {"count": 1, "listed": ["latin1.txt"]},
    }
    assert manifest["corpus"] == "text:text"


def test_a_few_text_files_give_both_splits(tokenizer: str, tmp_path: Path) -> None:
    for name, fraction in (("low", 1e-6), ("high", 1 - 1e-6)):
        (tmp_path / name).mkdir()
        for text in ("a", "b", "c"):
            (tmp_path / name / f"{text}.txt").write_text(text)
        recipe = recipe_of("TextFiles", tmp_path / name, tokenizer=tokenizer, val_fraction=fraction)
        make(tmp_path / f"of {name}", recipe)
        parts = [read_texts(tmp_path / f"of {name}", split) for split in ("val", "train")]
        assert sorted(parts[0] + parts[1]) == ["a", "b", "c"]


@functools.cache
def few_python_files() -> dict[str, Path]:
    return {name: path for name, path in python_files(include_site_packages=False).items() if name.startswith("json/")}


def test_python_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "python_files", lambda include_site_packages: few_python_files())
    options = Options(vocab_size=300, val_fraction=0.3)
    manifest = prepare(tmp_path / "out", python_sources(options), RunOptions(workers=1))
    found = [text for split in ("val", "train") for text in read_texts(tmp_path / "out", split)]
    assert sorted(found) == sorted({path.read_bytes().decode() for path in few_python_files().values()} - {""})
    assert_holds(tmp_path / "out", {split: read_texts(tmp_path / "out", split) for split in ("val", "train")})
    assert (manifest["vocab_size"], manifest["settings"]["include_site_packages"]) == (300, False)
    with pytest.raises(UserError, match="include_site_packages False → True"):
        prepare(tmp_path / "out", python_sources(Options(vocab_size=300, val_fraction=0.3, include_site_packages=True)))


def test_python_sources_are_the_standard_library() -> None:
    labels = set(python_files(include_site_packages=False))
    assert {"abc.py", "json/decoder.py", "asyncio/base_events.py"} <= labels
    assert not any("site-packages" in label for label in labels)


def test_site_packages_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, packages = tmp_path / "lib", tmp_path / "lib" / "site-packages"
    packages.mkdir(parents=True)
    (library / "a.py").write_text("a = 1\n")
    (packages / "b.py").write_text("b = 2\n")
    paths = {"stdlib": str(library), "purelib": str(packages), "platlib": str(packages)}
    monkeypatch.setattr("sysconfig.get_paths", lambda: paths)
    assert list(python_files(include_site_packages=False)) == ["a.py"]
    assert list(python_files(include_site_packages=True)) == ["a.py", "b.py"]


def test_empty_and_single_file_corpora_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"No file matches \*\*/\*\.txt in .*nowhere"):
        make(tmp_path / "shards", recipe_of("TextFiles", tmp_path / "nowhere"))
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_text("alone")
    with pytest.raises(UserError, match="1 different non-empty UTF-8 file"):
        make(tmp_path / "shards", recipe_of("TextFiles", tmp_path / "one"))
    assert hashes(tmp_path / "shards") == {}
    write_texts(tmp_path / "one", ["a", "b", "c"])  # and then it works, in the same place
    make(tmp_path / "shards", recipe_of("TextFiles", tmp_path / "one", vocab_size=257))


@pytest.mark.parametrize(("corpus", "pattern"), [("SlimPajama", "train/"), ("FineWebBin", r"\*\.bin")])
def test_a_source_without_the_corpus_is_refused(tmp_path: Path, corpus: str, pattern: str) -> None:
    with pytest.raises(UserError, match=r"There is no folder .*nowhere: set --source"):
        make(tmp_path / "shards", recipe_of(corpus, tmp_path / "nowhere", tokenizer="none"))
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match=rf"other has no file that matches .*{pattern}.*: set --source"):
        make(tmp_path / "shards", recipe_of(corpus, tmp_path / "other", tokenizer="none"))
