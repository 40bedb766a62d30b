"""Files that are not what their names say, names of fields, endings: read, or named as the cause."""

import bz2
import gzip
import io
import json
import lzma
import re
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from anlit.cli import main
from anlit.data.preparation.formats import Columns, is_one_text, read_file
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import json_lines, write
from tests.data.preparing import make, recipe_of
from tests.data.reader import edit, read_texts

TEXTS = [f"text number {number}" for number in range(40)]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 99\n"
LINES = b"".join(json_lines(TEXTS))


def zipped(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a", content)
    return buffer.getvalue()


def archived(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("a")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


FOREIGN: list[tuple[str, bytes, str]] = [
    *((f"a.{ending}", POINTER, "a Git LFS pointer and not the file itself: run `git lfs pull`")
      for ending in ("txt", "jsonl", "jsonl.zst", "txt.gz", "parquet")),
    *((f"a.{ending}", LINES.decode().encode("utf-16"), "UTF-16 and not UTF-8: convert it")
      for ending in ("txt", "jsonl")),
    ("a.txt.gz", gzip.compress(LINES.decode().encode("utf-16")), "UTF-16 and not UTF-8"),
    ("a.txt", LINES.decode().encode("utf-16-le"), "UTF-16 without a mark"),
    ("a.txt", LINES.decode().encode("utf-16-be"), "UTF-16 without a mark"),
    *((f"a.{ending}", bz2.compress(LINES), "compressed with bzip2, which is not read")
      for ending in ("txt.bz2", "jsonl.bz2", "jsonl")),
    ("a.jsonl.xz", lzma.compress(LINES), "compressed with xz, which is not read"),
    ("a.jsonl", gzip.compress(LINES), "compressed with gzip, and its name does not end in .gz: rename it"),
    ("a.txt", zstandard.compress(LINES), "compressed with zstd, and its name does not end in .zst"),
    ("a.zip", zipped(LINES), "a zip archive, which is not read: unpack it"),
    *((name, content, "a tar archive, which is not read: unpack it")
      for name, content in (("a.tar", archived(LINES)), ("a.tar.gz", gzip.compress(archived(LINES))))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "what"), FOREIGN)
def test_a_file_of_another_format_is_named_as_the_cause(
    name: str, content: bytes, what: str, tokenizer: str, tmp_path: Path, out: Path
) -> None:
    write(tmp_path / "text" / name, content)
    for number in range(2):
        write(tmp_path / "text" / f"good{number}.txt", TEXTS[number].encode())
    recipe = recipe_of("TextFiles", tmp_path / "text", tokenizer=tokenizer, pattern="*")
    with pytest.raises(UserError, match=rf"{re.escape(name)}.*: it is {re.escape(what)}.*Repair"):
        make(out, recipe)
    recipe = recipe_of(
        "TextFiles", tmp_path / "text", tokenizer=tokenizer, pattern="*", val_fraction=0.7
    )
    manifest = make(out, recipe, skip_bad=True)
    assert manifest["skipped"]["wrong_format"]["count"] == 1
    assert manifest["documents"] == 2


def test_a_pointer_in_place_of_tokens(tmp_path: Path, out: Path) -> None:
    files = layouts.fineweb_bin(tmp_path / "hub", [[1, 2], [3]], tokens_per_file=3)
    files[1].write_bytes(POINTER)
    with pytest.raises(UserError, match=r"train_000001\.bin is a Git LFS pointer"):
        make(out, recipe_of("FineWebBin", tmp_path / "hub", tokenizer="none"))


@pytest.mark.parametrize(
    "text", ["BZh is a name", "PK", "version 2", "\x00" * 20, "a\x00b\x00" * 3]
)
def test_a_text_that_only_begins_like_another_format_is_a_text(text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", text.encode())
    assert [record.text for record in read_file(path.name, path, Columns())] == [text]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("n_zeros", [1, 511, 100_000])
def test_a_compressed_file_that_is_filled_up_with_zeros(
    compress: Any, n_zeros: int, tmp_path: Path
) -> None:
    ending = "gz" if compress is gzip.compress else "zst"
    content = compress(LINES[:500]) + compress(LINES[500:]) + bytes(n_zeros)
    path = write(tmp_path / f"a.jsonl.{ending}", content)
    assert [record.text for record in read_file(path.name, path, Columns())] == TEXTS
    path.write_bytes(bytes(n_zeros) + content)
    *_, last = read_file(path.name, path, Columns())
    assert last.problem == "damaged"


@pytest.mark.parametrize(
    "ending", [".ndjson", ".jsonlines", ".NDJSON", ".ndjson.gz", ".jsonlines.zst"]
)
def test_all_names_of_json_lines(ending: str, tokenizer: str, tmp_path: Path, out: Path) -> None:
    name = f"a{ending}"
    assert not is_one_text(name)
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(name).suffix, bytes)
    write(tmp_path / "text" / name, compress(LINES))
    make(out, recipe_of("TextFiles", tmp_path / "text", tokenizer=tokenizer, pattern="*"))
    assert sorted(read_texts(out, "train") + read_texts(out, "val")) == sorted(TEXTS)


def test_names_of_fields_with_dots(tmp_path: Path) -> None:
    """The whole name comes first; otherwise dots lead into nested fields."""
    lines = [{"body.text": "whole", "body": {"text": "nested", "deep": {"text": "deeper"}}}]
    path = write(tmp_path / "a.jsonl", json.dumps(lines[0]).encode())
    pq.write_table(pa.Table.from_pylist(lines), tmp_path / "a.parquet")
    for file in (path, tmp_path / "a.parquet"):
        for field, text in (("body.text", "whole"), ("body.deep.text", "deeper")):
            (record,) = read_file(file.name, file, Columns(field))
            assert (record.text, record.problem) == (text, None), (file, field)


@pytest.mark.parametrize("tokenizer_option", [["--vocab_size", "300"], ["--tokenizer", "FILE"]])
def test_a_wrong_text_field_is_noticed_first_and_the_fields_are_listed(
    tokenizer_option: list[str], tokenizer: str, tmp_path: Path, capsys
) -> None:
    write(tmp_path / "text" / "a.jsonl", LINES)
    options = [tokenizer if word == "FILE" else word for word in tokenizer_option]
    source = ["--source", str(tmp_path / "text"), "--pattern", "*.jsonl", "--text_field", "txt"]
    assert main(["prepare", "TextFiles", *source, "--output", str(tmp_path / "o"), *options]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    what = 'the field "txt" is missing or null and not a string (its fields: text, meta)'
    assert f"a.jsonl, line 1: {what}. Repair" in said
    assert tokenizer_option[0] == "--tokenizer" or not list(tmp_path.glob("o/tokenizer.json"))


def test_no_text_to_train_a_tokenizer_on(tmp_path: Path, out: Path) -> None:
    write(tmp_path / "text" / "a.jsonl", LINES)
    recipe = recipe_of("TextFiles", tmp_path / "text", pattern="*.jsonl", text_field="txt")
    with pytest.raises(UserError, match=r"no text to train a tokenizer on: check .*--text_field"):
        make(out, recipe, skip_bad=True)


@pytest.mark.parametrize(("corpus", "option", "advice"), [
    ("TextFiles", {"val_fraction": 1e-9, "pattern": "*.jsonl"}, "with --val_fraction."),
    ("FineWeb", {"val_tokens": 10**6}, "set --val_tokens to a smaller number"),
])  # fmt: skip
def test_only_options_that_the_corpus_takes_are_advised(
    corpus: str, option: dict[str, Any], advice: str, tokenizer: str, tmp_path: Path, out: Path
) -> None:
    write(tmp_path / "hub" / "a.jsonl", LINES)
    layouts.fineweb(tmp_path / "hub", TEXTS)
    with pytest.raises(UserError) as error:
        make(out, recipe_of(corpus, tmp_path / "hub", tokenizer=tokenizer, **option))
    assert advice in str(error.value)
    other = "--val_tokens" if corpus == "TextFiles" else "--val_fraction"
    assert other not in str(error.value)


def test_a_tokenizer_with_another_end_token_names_the_option_of_prepare(
    tokenizer: str, tmp_path: Path, capsys
) -> None:
    """As Llama 3's, whose end token is <|end_of_text|>."""
    path = tmp_path / "llama3.json"
    path.write_bytes(Path(tokenizer).read_bytes())
    edit(path, lambda content: content["added_tokens"][0].update(content="<|end_of_text|>"))
    for number in range(3):
        write(tmp_path / "text" / f"{number}.txt", TEXTS[number].encode())
    command = ["prepare", "TextFiles", "--source", str(tmp_path / "text"), "--tokenizer", str(path)]
    command += ["--output", str(tmp_path / "out")]
    assert main(command) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"special tokens: <\|end_of_text\|>\): set --end_of_document ", said)
    assert main([*command, "--end_of_document", "<|end_of_text|>"]) == 0
