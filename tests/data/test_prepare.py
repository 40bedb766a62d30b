"""Shards of each corpus's files, in the hub's layout: nothing is lost, mixed or guessed."""

import gzip
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from litdata import StreamingDataset, TokensLoader
from tokenizers import Tokenizer, models, pre_tokenizers

from anlit.data.preparation.sources import list_python_library
from anlit.data.tokenizer import train_bpe
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import (
    END_OF_DOCUMENT,
    SUBSETS,
    cut,
    documents,
    json_lines,
    short_documents,
    write,
)
from tests.data.preparing import SIZES, make, recipe_of, record_times, train_tokenizer
from tests.data.reader import (
    all_texts,
    assert_holds,
    by_split,
    edit,
    encoded,
    hashes,
    read_files,
    read_stream,
    read_texts,
)

BIG = {"task_bytes": 1 << 20, "chunk_bytes": 1 << 20}


def file_record(name: str, file: Path, texts: list[str], tokenizer: str) -> dict[str, Any]:
    """Return what a task records of a source file with these texts."""
    return {
        "name": name,
        "sha256": sha256(file.read_bytes()).hexdigest(),
        "documents": len(texts),
        "bytes": len("".join(texts).encode()),
        "tokens": len(encoded(tokenizer, texts)),
    }


def tokens_of_bin(file: Path) -> np.ndarray:
    """Return the tokens after the header of 1,024 bytes."""
    return np.frombuffer(file.read_bytes()[1024:], "<u2")


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_slimpajama_is_sorted_into_splits_and_subsets(
    tokenizer: str, source: Path, out: Path
) -> None:
    """Documents have unicode of all kinds; one has more than a megabyte."""
    texts = list(documents(70))
    texts_by_folder = {"train": texts[:50], "validation": texts[50:61], "test": texts[61:]}
    layouts.slimpajama(source, texts_by_folder, n_files=3)

    manifest = make(out, recipe_of("SlimPajama", source, BIG, tokenizer=tokenizer))

    texts_by_split = {"train": texts[:50], "val": texts[50:61], "test": texts[61:]}
    streams: dict[str, list[str]] = {}
    for split, texts_of_split in texts_by_split.items():
        for number, text in enumerate(texts_of_split):
            stream = f"{split}/{SUBSETS[number % 7]}"
            streams.setdefault(stream, []).append(text)
    assert_holds(out, streams)
    assert set(manifest["train"]["subsets"]) == set(SUBSETS)
    assert manifest["versions"].keys() >= {"python", "anlit", "tokenizers"}
    expected_values = {
        "corpus": "SlimPajama",
        "command": "anlit prepare",
        "dtype": "uint16",
        "vocab_size": 800,
        "skipped": {},
        "end_of_document": 799,
        "document_token_at": "end",
        "tokenizer_sha256": sha256(Path(tokenizer).read_bytes()).hexdigest(),
    }
    assert expected_values.items() <= manifest.items()


def test_each_source_file_is_recorded_with_its_hash_and_counts(
    tokenizer: str, source: Path, out: Path
) -> None:
    texts = short_documents(30, seed=10)
    texts_by_folder = {"train": texts[:20], "validation": texts[20:]}
    files = layouts.slimpajama(source, texts_by_folder, n_files=3)

    make(out, recipe_of("SlimPajama", source, BIG, tokenizer=tokenizer))

    file_texts = cut(texts[:20], 3) + cut(texts[20:], 3)
    expected = {}
    for file, texts_of_file in zip(files, file_texts, strict=True):
        name = file.relative_to(source).as_posix()
        expected[name] = file_record(name, file, texts_of_file, tokenizer)
    assert read_files(out) == expected


def test_unpacked_files_of_slimpajama_are_in_the_order_of_their_numbers(
    tokenizer: str, source: Path, out: Path
) -> None:
    """The digit ² belongs to no number."""
    in_order = []
    for chunk in (1, 2, 10):
        for number in (0, 9, 10, 100):
            text = f"{chunk}/{number}"
            in_order.append(text)
            path = source / "train" / f"chunk{chunk}" / f"²{number}.jsonl"
            write(path, json_lines([text])[0])
    write(source / "validation" / "chunk1" / "a.jsonl", json_lines(["val"])[0])

    make(out, recipe_of("SlimPajama", source, tokenizer=tokenizer))

    assert_holds(out, {"train/RedPajamaC4": in_order, "val/RedPajamaC4": ["val"]})


def test_no_name_of_a_subset_leads_out_of_the_folder(
    tokenizer: str, source: Path, tmp_path: Path, out: Path
) -> None:
    subsets = ["../../mine", "..", ".", "a b", "größe", "a/b"]
    write(source / "train" / "chunk1" / "a.jsonl", json_lines(["train"])[0])
    write(source / "validation" / "chunk1" / "a.jsonl", b"".join(json_lines(subsets, subsets)))

    manifest = make(out, recipe_of("SlimPajama", source, tokenizer=tokenizer))

    streams = {"train/RedPajamaC4": ["train"]}
    val_texts = []
    for name in manifest["val"]["subsets"]:
        texts = read_texts(out, f"val/{name}")
        streams[f"val/{name}"] = texts
        val_texts += texts
    assert_holds(out, streams)
    assert sorted(val_texts) == sorted(subsets)
    assert names_in(out / "val") == set(manifest["val"]["subsets"])
    assert names_in(tmp_path) == {"source", "out"}


def test_openwebtext_holds_out_as_many_documents_as_the_papers(tmp_path: Path) -> None:
    assert round(8_013_769 * recipe_of("OpenWebText", tmp_path).val_fraction) == 10_000


@pytest.mark.parametrize(("past_the_end", "n_held_out"), [(-1, 5), (0, 5), (1, 6)])
def test_fineweb_is_cut_at_the_end_of_a_document(
    tokenizer: str, source: Path, out: Path, past_the_end: int, n_held_out: int
) -> None:
    texts = short_documents(50, seed=4)
    layouts.fineweb(source, texts, n_files=4)
    end = len(encoded(tokenizer, texts[:5]))  # in the first task
    val_tokens = end + past_the_end

    make(out, recipe_of("FineWeb", source, tokenizer=tokenizer, val_tokens=val_tokens))

    assert_holds(out, {"val": texts[:n_held_out], "train": texts[n_held_out:]})
    assert len(record_times(out)) > 1


def test_fineweb_bin_with_its_tokenizer(tokenizer: str, source: Path, out: Path) -> None:
    token_documents = []
    for number in range(100):
        length = 2 * number + 1
        token_documents.append([number * place % 799 for place in range(length)])
    files = layouts.fineweb_bin(source, token_documents, 2500, separator=799)
    recipe = recipe_of("FineWebBin", source, SIZES, tokenizer=tokenizer)

    manifest = make(out, recipe, workers=2)

    val, *train = [tokens_of_bin(file) for file in files]
    streams = {"val": val, "train": np.concatenate(train)}
    for split, tokens in streams.items():
        assert read_stream(out, split).tolist() == tokens.tolist()
        assert manifest[split]["documents"] == (tokens == 799).sum()
        assert manifest[split]["bytes"] is None  # their text is unknown
        assert manifest[split]["tokens"] == len(tokens)
    assert manifest["documents"] == 100
    assert manifest["vocab_size"] == 800
    assert manifest["end_of_document"] == 799
    assert manifest["document_token_at"] == "start"
    assert (out / "tokenizer.json").read_bytes() == Path(tokenizer).read_bytes()
    assert read_files(out).keys() == {file.name for file in files}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (layouts.bin_tokens([1, 2, 3], magic=20240521), r"begins with \[20240521, 1, 3\]\)"),
        (
            layouts.bin_tokens([1, 2, 3], count=4),
            r"1,030 bytes it has to begin with \[20240520, 1, 3\] and .* 4\]\): fetch",
        ),
        (layouts.bin_tokens([1]) + b"\0", r"is not a complete file of tokens \(with 1,027 bytes"),
        (bytes(1023), "with 1,023 bytes"),
        (layouts.bin_tokens([50257]), "has token 50257, and the vocabulary has 50257:"),
    ],
    ids=["magic number", "count", "odd size", "no header", "vocabulary"],
)
def test_wrong_token_files_are_refused(
    source: Path, out: Path, content: bytes, message: str
) -> None:
    files = layouts.fineweb_bin(source, [[1, 2], [3]], tokens_per_file=3)
    files[1].write_bytes(content)

    with pytest.raises(UserError, match=rf"train_000001\.bin .*{message}"):
        make(out, recipe_of("FineWebBin", source, tokenizer="none"))


@pytest.mark.parametrize("fraction", [1e-6, 1 - 1e-6])
def test_a_few_text_files_give_both_splits(
    fraction: float, tokenizer: str, source: Path, out: Path
) -> None:
    for text in ("a", "b", "c"):
        write(source / f"{text}.txt", text.encode())

    make(out, recipe_of("TextFiles", source, tokenizer=tokenizer, val_fraction=fraction))

    assert all_texts(out) == ["a", "b", "c"]


@pytest.mark.parametrize("pattern", ["*", "**/[a-c].*"])
def test_documents_are_held_out_whatever_the_pattern(
    pattern: str, tokenizer: str, source: Path, out: Path
) -> None:
    """A file of many documents has a tenth of them held out, not all or none."""
    texts = short_documents(90, seed=8)
    write(source / "a.json", b"".join(json_lines(texts[2:])))
    write(source / "b.txt", texts[0].encode())
    write(source / "c.txt.gz", gzip.compress(texts[1].encode()))
    (source / "c.json").symlink_to("nowhere")
    options = {"pattern": pattern, "val_fraction": 0.1}
    recipe = recipe_of("TextFiles", source, tokenizer=tokenizer, **options)

    message = r"c\.json: it is not a regular file: repair .* --on_bad skip"
    with pytest.raises(UserError, match=message):
        make(out, recipe)
    manifest = make(out, recipe, skip_bad=True)

    assert manifest["skipped"] == {"unreadable": {"count": 1, "listed": ["c.json"]}}
    expected = by_split(texts, 0.1)
    assert sorted(read_texts(out, "val")) == sorted(expected["val"])
    assert sorted(read_texts(out, "train")) == sorted(expected["train"])


def test_names_of_all_kinds(tokenizer: str, source: Path, out: Path, monkeypatch) -> None:
    """Separators, letters beyond ASCII, bytes that are not UTF-8; and two names of the source."""
    good_names = ["a\u2028b.txt", "c\x85d.txt", "größe.txt", "new\nline.txt"]
    bad_names = ["\udcff.txt", "latin\udce4.txt"]
    for name in good_names + bad_names:
        write(source / name, name.encode("utf-8", "surrogateescape"))
    monkeypatch.chdir(source)
    os.mkfifo("~pipe.txt")  # which may never end
    Path("~link.txt").symlink_to("nowhere")
    Path("folder.txt").mkdir()
    options = {"tokenizer": tokenizer, "val_fraction": 0.5}
    recipe = recipe_of("TextFiles", Path("../source"), **options)
    same_recipe = recipe_of("TextFiles", Path("."), **options)

    message = r"source/.*\.txt: it is not UTF-8 \(.*out with anlit prepare.s --on_bad skip"
    with pytest.raises(UserError, match=message):
        make(out, recipe)
    manifest = make(out, recipe, skip_bad=True)

    assert make(out, same_recipe, skip_bad=True) == manifest
    assert sorted(manifest["skipped"]["not_utf8"]["listed"]) == sorted(bad_names)
    assert manifest["skipped"]["unreadable"]["listed"] == ["~link.txt", "~pipe.txt"]
    assert read_files(out).keys() == set(good_names)


def test_the_files_of_python_s_library() -> None:
    names = set(list_python_library(include_site_packages=False))

    assert {"abc.py", "json/decoder.py", "asyncio/base_events.py"} <= names
    assert not any("site-packages" in name for name in names)


def test_python_sources(source: Path, tmp_path: Path, out: Path, monkeypatch) -> None:
    library_texts = [f"a = {number}\n" for number in range(4)]
    for number, text in enumerate(library_texts):
        write(source / f"{number}.py", text.encode())
    packages = source / "site-packages"
    write(packages / "b.py", b"b = 2\n")
    paths = {"stdlib": str(source), "purelib": str(packages), "platlib": str(packages)}
    monkeypatch.setattr("sysconfig.get_paths", lambda: paths)
    options = {"vocab_size": 300, "val_fraction": 0.3}
    recipe = recipe_of("PythonSources", None, {}, **options)
    larger_recipe = recipe_of("PythonSources", None, {}, include_site_packages=True, **options)
    larger = tmp_path / "larger"

    make(out, recipe)
    make(larger, larger_recipe)

    assert all_texts(out) == library_texts
    assert all_texts(larger) == [*library_texts, "b = 2\n"]
    for folder in (out, larger):
        streams = {split: read_texts(folder, split) for split in ("val", "train")}
        assert_holds(folder, streams)
    with pytest.raises(UserError, match="include_site_packages False → True"):
        make(out, larger_recipe)


@pytest.mark.parametrize(
    ("corpus", "files", "tokenizer_option", "message"),
    [
        ("TextFiles", ["a.txt"], "bpe", "1 different non-empty UTF-8 file"),
        ("FineWebBin", [], None, r"There is no folder .*source: set --source"),
        ("SlimPajama", ["a.txt"], "bpe", r"has no file that matches .*train/.*: set --source"),
        (
            "SlimPajama",
            ["train/a.jsonl", "test/a.jsonl"],
            "bpe",
            "no file whose name begins with validation/.*--source",
        ),
    ],
    ids=["one text", "no folder", "no file", "no validation"],
)
def test_a_source_without_the_corpus_leaves_nothing_behind(
    corpus: str,
    files: list[str],
    tokenizer_option: str | None,
    message: str,
    source: Path,
    out: Path,
) -> None:
    for name in files:
        write(source / name, b"alone")
    recipe = recipe_of(corpus, source, tokenizer=tokenizer_option)

    with pytest.raises(UserError, match=message):
        make(out, recipe)

    assert hashes(out) == {}
    layouts.text_files(source, ["a", "b", "c"])
    make(out, recipe_of("TextFiles", source, vocab_size=257))


@pytest.mark.parametrize("ending", [".txt", ".jsonl"])
def test_the_trained_tokenizer_has_seen_the_training_texts_only(
    source: Path, out: Path, ending: str
) -> None:
    texts = short_documents(50, seed=2)
    options: dict[str, Any] = {"vocab_size": 320, "val_fraction": 0.2}
    if ending == ".txt":
        layouts.text_files(source, texts)
    else:
        options["pattern"] = layouts.json_files(source, texts)
        options["text_field"] = "content"

    make(out, recipe_of("TextFiles", source, **options))

    train = read_texts(out, "train")
    val = read_texts(out, "val")
    stored = Tokenizer.from_file(str(out / "tokenizer.json")).to_str()
    assert stored == train_bpe(train, 320).to_str()
    assert stored != train_bpe(train + val, 320).to_str()


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "int32")])
def test_tokens_take_two_bytes_where_they_can_and_litdata_reads_them(
    source: Path, tmp_path: Path, out: Path, vocab_size: int, dtype: str
) -> None:
    """The tokenizer has bytes first, then words that no text has, the end of a document last."""
    path = train_tokenizer(tmp_path / "tokenizer.json", 257)
    end = vocab_size - 1
    more_words = {f"<{number}>": number for number in range(256, end)}
    end_token = {"id": end, "content": "<eod>"}
    edit(path, lambda content: content["model"]["vocab"].update(more_words))
    edit(path, lambda content: content["added_tokens"][0].update(end_token))
    texts = short_documents(15, seed=5)
    layouts.openwebtext(source, texts)
    options = {"tokenizer": str(path), "val_fraction": 0.2, "end_of_document": "<eod>"}

    manifest = make(out, recipe_of("OpenWebText", source, **options))

    assert manifest["dtype"] == dtype
    assert manifest["vocab_size"] == vocab_size
    assert manifest["end_of_document"] == end
    train_texts = by_split(texts, 0.2)["train"]
    expected = encoded(out / "tokenizer.json", train_texts, "<eod>")
    assert expected[-1] == end
    assert read_stream(out, "train").tolist() == expected
    blocks = StreamingDataset(
        str(out / "train"), item_loader=TokensLoader(block_size=1), shuffle=False, drop_last=False
    )
    assert [int(block[0]) for block in blocks] == expected


def test_a_text_that_is_encoded_to_the_end_of_document(
    source: Path, tmp_path: Path, out: Path
) -> None:
    """As where a tokenizer has the same token for unknown words."""
    words = [END_OF_DOCUMENT, "one", "two", "<|", "endoftext", "|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END_OF_DOCUMENT))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    path = tmp_path / "words.json"
    tokenizer.save(str(path))
    texts = ["one", "two", "one three two", "two one", "two two"]
    layouts.openwebtext(source, texts, n_files=1)
    options = {"tokenizer": str(path), "val_fraction": 0.3}
    recipe = recipe_of("OpenWebText", source, **options)

    message = r"row 3: the tokenizer makes the end-of-document token out of its text"
    with pytest.raises(UserError, match=message):
        make(out, recipe)
    manifest = make(out, recipe, skip_bad=True)

    assert manifest["documents"] == 4
    assert manifest["skipped"]["separator"]["count"] == 1
    tokens = [*read_stream(out, "train"), *read_stream(out, "val")]
    assert tokens.count(0) == 4


def test_texts_that_are_all_of_another_encoding_are_named(source: Path, out: Path) -> None:
    for name in ("a.txt", "b.txt"):
        write(source / name, f"text {name}".encode("utf-16"))

    with pytest.raises(UserError, match=r"out of 2 \(.*a\.txt: it is UTF-16 .*iconv"):
        make(out, recipe_of("TextFiles", source))
