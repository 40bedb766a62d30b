"""From each corpus's files, in the hub's layout, to shards: nothing is lost, mixed or guessed."""

import gzip
import itertools
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from litdata import StreamingDataset, TokensLoader
from tokenizers import Tokenizer, models, pre_tokenizers

from anlit.data.preparation.file_lists import list_python_library
from anlit.data.tokenizer import train_bpe
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import END_OF_DOCUMENT, SET_NAMES, cut, documents, json_lines, write
from tests.data.preparing import SIZES, make, recipe_of, train_tokenizer, written
from tests.data.reader import (
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


def test_slimpajama(tokenizer: str, tmp_path: Path, out: Path) -> None:
    """With unicode of all kinds, and one document of more than a megabyte."""
    texts = list(documents(70))
    by_folder = {"train": texts[:50], "validation": texts[50:61], "test": texts[61:]}
    files = layouts.slimpajama(tmp_path / "hub", by_folder, n_files=3)
    manifest = make(out, recipe_of("SlimPajama", tmp_path / "hub", BIG, tokenizer=tokenizer))
    streams: dict[str, list[str]] = {}
    for split, some in zip(("train", "val", "test"), by_folder.values(), strict=True):
        for number, text in enumerate(some):
            streams.setdefault(f"{split}/{SET_NAMES[number % 7]}", []).append(text)
    assert_holds(out, streams)
    parts = [part for some in by_folder.values() for part in cut(some, 3)]
    listed = read_files(out)
    for file, part in zip(files, parts, strict=True):
        name, size = (
            file.relative_to(tmp_path / "hub").as_posix(),
            sum(len(text.encode()) for text in part),
        )
        counts = {"documents": len(part), "bytes": size, "tokens": len(encoded(tokenizer, part))}
        assert listed.pop(name) == {
            "name": name,
            "sha256": sha256(file.read_bytes()).hexdigest(),
            **counts,
        }
    assert not listed
    assert set(manifest["train"]["subsets"]) == set(SET_NAMES)
    sha = sha256(Path(tokenizer).read_bytes()).hexdigest()
    said = {"corpus": "SlimPajama", "command": "anlit prepare", "dtype": "uint16", "vocab_size": 800, "skipped": {},
            "end_of_document": 799, "document_token_at": "end", "tokenizer_sha256": sha}  # fmt: skip
    assert said.items() <= manifest.items()
    assert {"python", "anlit", "tokenizers"} <= set(manifest["versions"])


def test_slimpajama_unpacked(tokenizer: str, tmp_path: Path, out: Path) -> None:
    """Files in the order of their numbers, and a raised ² is none; names of subsets stay inside the folder."""
    expected = [f"{chunk}/{number}" for chunk in (1, 2, 10) for number in (0, 9, 10, 100)]
    names = ["../../mine", "..", ".", "a b", "größe", "a/b"]
    for text in expected:
        write(tmp_path / f"hub/train/chunk{text.replace('/', '/²')}.jsonl", json_lines([text])[0])
    write(
        tmp_path / "hub/validation/chunk1/example_holdout_0.jsonl",
        b"".join(json_lines(names, names)),
    )
    manifest = make(out, recipe_of("SlimPajama", tmp_path / "hub", tokenizer=tokenizer))
    subsets = {name: read_texts(out, f"val/{name}") for name in manifest["val"]["subsets"]}
    assert {path.name for path in (out / "val").iterdir()} == set(subsets)
    assert sorted(itertools.chain(*subsets.values())) == sorted(names)
    streams = {f"val/{name}": texts for name, texts in subsets.items()}
    assert_holds(out, {"train/RedPajamaC4": expected, **streams})
    assert {path.name for path in tmp_path.iterdir()} == {"hub", "out"}


def test_openwebtext_holds_out_as_many_as_the_papers(tmp_path: Path) -> None:
    assert round(8_013_769 * recipe_of("OpenWebText", tmp_path).val_fraction) == 10_000


@pytest.mark.parametrize("past_the_end", [-1, 0, 1])
def test_fineweb_s_cut_at_the_end_of_a_document(
    tokenizer: str, tmp_path: Path, out: Path, past_the_end: int
) -> None:
    some = list(documents(60, seed=4))[10:]
    layouts.fineweb(tmp_path / "hub", some, n_files=4)
    end = len(encoded(tokenizer, some[:5]))  # in the first task
    make(
        out,
        recipe_of("FineWeb", tmp_path / "hub", tokenizer=tokenizer, val_tokens=end + past_the_end),
    )
    held_out = 6 if past_the_end > 0 else 5
    assert_holds(out, {"val": some[:held_out], "train": some[held_out:]})
    assert len(written(out)) > 1


def test_fineweb_bin_with_its_tokenizer(tokenizer: str, tmp_path: Path, out: Path) -> None:
    some = [[number * place % 799 for place in range(2 * number + 1)] for number in range(100)]
    files = layouts.fineweb_bin(tmp_path / "hub", some, 2500, end=799)
    parts = [np.frombuffer(file.read_bytes(), "<u2")[512:].tolist() for file in files]
    manifest = make(out, recipe_of("FineWebBin", tmp_path / "hub", SIZES, tokenizer=tokenizer), 2)
    for split, tokens in (
        ("val", parts[0]),
        ("train", [token for part in parts[1:] for token in part]),
    ):
        assert read_stream(out, split).tolist() == tokens
        counts = {
            "documents": tokens.count(799),
            "bytes": None,
            "tokens": len(tokens),
        }  # their text is not known
        assert {key: manifest[split][key] for key in counts} == counts
    said = {
        "documents": 100,
        "vocab_size": 800,
        "end_of_document": 799,
        "document_token_at": "start",
    }
    assert said.items() <= manifest.items()
    assert (out / "tokenizer.json").read_bytes() == Path(tokenizer).read_bytes()
    assert set(read_files(out)) == {file.name for file in files}


@pytest.mark.parametrize(("content", "said"), [
    (layouts.bin_tokens([1, 2, 3], magic=20240521), r"begins with \[20240521, 1, 3\]"),
    (layouts.bin_tokens([1, 2, 3], count=4), r"1,030 bytes it has to begin with \[20240520, 1, 3\] and .* 4\]"),
    (layouts.bin_tokens([1]) + b"\0", "is not a whole file of tokens: with 1,027 bytes"),
    (bytes(1023), "with 1,023 bytes"),
    (layouts.bin_tokens([50257]), "holds token 50257, and the vocabulary has 50257:"),
])  # fmt: skip
def test_wrong_token_files_are_refused(
    tmp_path: Path, out: Path, content: bytes, said: str
) -> None:
    layouts.fineweb_bin(tmp_path / "hub", [[1, 2], [3]], tokens_per_file=3)[1].write_bytes(content)
    with pytest.raises(UserError, match=rf"train_000001\.bin .*{said}"):
        make(out, recipe_of("FineWebBin", tmp_path / "hub", tokenizer="none"))


@pytest.mark.parametrize("fraction", [1e-6, 1 - 1e-6])
def test_a_few_text_files_give_both_splits(
    fraction: float, tokenizer: str, tmp_path: Path, out: Path
) -> None:
    for text in ("a", "b", "c"):
        write(tmp_path / "text" / f"{text}.txt", text.encode())
    make(out, recipe_of("TextFiles", tmp_path / "text", tokenizer=tokenizer, val_fraction=fraction))
    assert sorted(read_texts(out, "val") + read_texts(out, "train")) == ["a", "b", "c"]


@pytest.mark.parametrize("pattern", ["*", "**/[a-c].*"])
def test_documents_are_held_out_whatever_the_pattern(
    pattern: str, tokenizer: str, tmp_path: Path, out: Path
) -> None:
    """What the files are decides: a tenth of a file's documents is held out, not all of them or none."""
    some = list(documents(100, seed=8))[10:]
    contents = {"a.json": b"".join(json_lines(some[2:])), "b.txt": some[0].encode()}
    for name, content in (contents | {"c.txt.gz": gzip.compress(some[1].encode())}).items():
        write(tmp_path / "text" / name, content)
    (tmp_path / "text" / "c.json").symlink_to("nowhere")
    recipe = recipe_of(
        "TextFiles", tmp_path / "text", tokenizer=tokenizer, pattern=pattern, val_fraction=0.1
    )
    with pytest.raises(
        UserError, match=r"c\.json: it is no regular file\. Repair .* --on_bad skip"
    ):
        make(out, recipe)
    assert make(out, recipe, skip_bad=True)["skipped"] == {
        "unreadable": {"count": 1, "listed": ["c.json"]}
    }
    expected = {split: sorted(texts) for split, texts in by_split(some, 0.1).items()}
    assert {split: sorted(read_texts(out, split)) for split in expected} == expected


def test_names_of_all_kinds(tokenizer: str, tmp_path: Path, out: Path, monkeypatch) -> None:
    """Separators, letters beyond ASCII, bytes that are not UTF-8 in names; other names of the source are the same."""
    names = [
        "a\u2028b.txt",
        "c\x85d.txt",
        "größe.txt",
        "new\nline.txt",
        "\udcff.txt",
        "latin\udce4.txt",
    ]
    for name in names:
        write(tmp_path / "text" / name, name.encode("utf-8", "surrogateescape"))
    monkeypatch.chdir(tmp_path / "text")
    os.mkfifo("~pipe.txt")  # which may never end
    Path("~link.txt").symlink_to("nowhere")
    Path("folder.txt").mkdir()
    recipes = [
        recipe_of("TextFiles", Path(name), tokenizer=tokenizer, val_fraction=0.5)
        for name in ("../text", ".")
    ]
    with pytest.raises(
        UserError, match=r"text/.*\.txt: it is not UTF-8 \(.*out with anlit prepare.s --on_bad skip"
    ):
        make(out, recipes[0])
    manifest, again = (make(out, recipe, skip_bad=True) for recipe in recipes)
    assert manifest == again
    assert sorted(manifest["skipped"]["not_utf8"]["listed"]) == sorted(names[4:])
    assert manifest["skipped"]["unreadable"]["listed"] == ["~link.txt", "~pipe.txt"]
    assert set(read_files(out)) == set(names[:4])


def test_python_sources(tmp_path: Path, monkeypatch) -> None:
    labels = set(list_python_library(include_site_packages=False))
    assert {"abc.py", "json/decoder.py", "asyncio/base_events.py"} <= labels
    assert not any("site-packages" in label for label in labels)
    for number in range(4):
        write(tmp_path / "library" / f"{number}.py", f"a = {number}\n".encode())
    packages = str(write(tmp_path / "library" / "site-packages" / "b.py", b"b = 2\n").parent)
    paths = {"stdlib": str(tmp_path / "library"), "purelib": packages, "platlib": packages}
    monkeypatch.setattr("sysconfig.get_paths", lambda: paths)
    for name, more in (("out", False), ("more", True)):
        own = recipe_of(
            "PythonSources", None, {}, include_site_packages=more, vocab_size=300, val_fraction=0.3
        )
        make(tmp_path / name, own)
        streams = {split: read_texts(tmp_path / name, split) for split in ("val", "train")}
        expected = [f"a = {number}\n" for number in range(4)] + ["b = 2\n"] * more
        assert sorted(streams["val"] + streams["train"]) == expected
        assert_holds(tmp_path / name, streams)
    with pytest.raises(UserError, match="include_site_packages False → True"):
        make(tmp_path / "out", own)


@pytest.mark.parametrize(("corpus", "files", "says"), [
    ("TextFiles", ["a.txt"], "1 different non-empty UTF-8 file"),
    ("FineWebBin", [], r"There is no folder .*hub: set --source"),
    ("SlimPajama", ["a.txt"], r"hub has no file that matches .*train/.*: set --source"),
    ("SlimPajama", ["train/a.jsonl", "test/a.jsonl"], "no file whose name begins with validation/.*--source"),
])  # fmt: skip
def test_a_source_without_the_corpus(
    corpus: str, files: list[str], says: str, tmp_path: Path, out: Path
) -> None:
    """And does not stand in the way of one that has it."""
    for name in files:
        write(tmp_path / "hub" / name, b"alone")
    with pytest.raises(UserError, match=says):
        make(
            out,
            recipe_of(
                corpus, tmp_path / "hub", tokenizer="bpe" if corpus != "FineWebBin" else None
            ),
        )
    assert hashes(out) == {}
    make(
        out,
        recipe_of(
            "TextFiles", layouts.text_files(tmp_path / "text", ["a", "b", "c"]), vocab_size=257
        ),
    )


@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_the_trained_tokenizer_has_seen_the_training_part_only(
    tmp_path: Path, out: Path, kind: str
) -> None:
    some = list(documents(60, seed=2))[10:]
    options: dict[str, Any] = {}
    if kind == ".txt":
        layouts.text_files(tmp_path / "text", some)
    else:
        options = {"pattern": layouts.json_files(tmp_path / "text", some), "text_field": "content"}
    make(
        out, recipe_of("TextFiles", tmp_path / "text", vocab_size=320, val_fraction=0.2, **options)
    )
    train, val = (read_texts(out, split) for split in ("train", "val"))
    stored = Tokenizer.from_file(str(out / "tokenizer.json")).to_str()
    assert train_bpe(train, 320).to_str() == stored != train_bpe(train + val, 320).to_str()


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "int32")])
def test_tokens_take_two_bytes_where_they_can_and_litdata_reads_them(
    tmp_path: Path, out: Path, vocab_size: int, dtype: str
) -> None:
    """With a tokenizer of bytes first, then words that no text has, the end of a document last."""
    path = train_tokenizer(tmp_path / "tokenizer.json", 257)
    more = {f"<{number}>": number for number in range(256, vocab_size - 1)}
    edit(path, lambda content: content["model"]["vocab"].update(more))
    edit(
        path, lambda content: content["added_tokens"][0].update(id=vocab_size - 1, content="<eod>")
    )
    some = list(documents(25, seed=5))[10:]
    layouts.openwebtext(tmp_path / "hub", some)
    own = {"tokenizer": str(path), "val_fraction": 0.2, "end_of_document": "<eod>"}
    manifest = make(out, recipe_of("OpenWebText", tmp_path / "hub", **own))
    assert (manifest["dtype"], manifest["vocab_size"]) == (dtype, vocab_size)
    tokens = read_stream(out, "train")
    assert tokens.tolist() == encoded(out / "tokenizer.json", by_split(some, 0.2)["train"], "<eod>")
    assert tokens.max() == vocab_size - 1 == manifest["end_of_document"]
    by_one = {"item_loader": TokensLoader(block_size=1), "shuffle": False, "drop_last": False}
    assert [
        int(block[0]) for block in StreamingDataset(str(out / "train"), **by_one)
    ] == tokens.tolist()


def test_a_text_that_is_encoded_to_the_end_of_document(tmp_path: Path, out: Path) -> None:
    """As where a tokenizer has the same token for unknown words."""
    vocabulary = {
        word: number
        for number, word in enumerate([END_OF_DOCUMENT, "one", "two", "<|", "endoftext", "|>"])
    }
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=END_OF_DOCUMENT))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens([END_OF_DOCUMENT])
    words.save(str(tmp_path / "words.json"))
    layouts.openwebtext(
        tmp_path / "hub", ["one", "two", "one three two", "two one", "two two"], n_files=1
    )
    recipe = recipe_of(
        "OpenWebText", tmp_path / "hub", tokenizer=str(tmp_path / "words.json"), val_fraction=0.3
    )
    with pytest.raises(
        UserError, match=r"row 3: the tokenizer makes the end-of-document token out of its text"
    ):
        make(out, recipe)
    manifest = make(out, recipe, skip_bad=True)
    assert (manifest["documents"], manifest["skipped"]["separator"]["count"]) == (4, 1)
    assert [
        token for split in ("train", "val") for token in read_stream(out, split).tolist()
    ].count(0) == 4
