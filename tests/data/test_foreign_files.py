"""Files that are not what their names say, names of fields, endings: read, or named as a cause."""

import bz2
import gzip
import io
import json
import lzma
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from anlit.cli import main
from anlit.data.preparation.formats import is_one_text, read_file
from anlit.data.preparation.formats.text import Columns
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import json_lines, write
from tests.data.preparing import make, recipe_of
from tests.data.reader import all_texts, edit

Compress = Callable[[bytes], bytes]
TEXTS = [f"text number {number}" for number in range(40)]
LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 99\n"
)
LINES = b"".join(json_lines(TEXTS))
TEXT = LINES.decode()
UTF16_LINES = TEXT.encode("utf-16")
UTF16_LITTLE_ENDIAN = TEXT.encode("utf-16-le")
UTF16_BIG_ENDIAN = TEXT.encode("utf-16-be")


def zip_archive(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a", content)
    return buffer.getvalue()


def tar_archive(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("a")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


LFS = "a Git LFS pointer and not the file itself: run `git lfs pull`"
GZIP = "compressed with gzip, and its name does not end in .gz: rename it"
ZSTD = "compressed with zstd, and its name does not end in .zst"
XZ = "compressed with xz, which is not read"
ZIP = "a zip archive, which is not read: unpack it"
UTF16 = "UTF-16 and not UTF-8: convert it"
UTF16_NO_MARK = "UTF-16 without a mark"
BZIP2 = "compressed with bzip2, which is not read"
TAR = "a tar archive, which is not read: unpack it"
FOREIGN: list[tuple[str, bytes, str]] = [
    ("a.txt", LFS_POINTER, LFS),
    ("a.jsonl", LFS_POINTER, LFS),
    ("a.jsonl.zst", LFS_POINTER, LFS),
    ("a.txt.gz", LFS_POINTER, LFS),
    ("a.parquet", LFS_POINTER, LFS),
    ("a.txt", UTF16_LINES, UTF16),
    ("a.jsonl", UTF16_LINES, UTF16),
    ("a.txt.gz", gzip.compress(UTF16_LINES), UTF16),
    ("a.txt", UTF16_LITTLE_ENDIAN, UTF16_NO_MARK),
    ("a.txt", UTF16_BIG_ENDIAN, UTF16_NO_MARK),
    ("a.txt.bz2", bz2.compress(LINES), BZIP2),
    ("a.jsonl.bz2", bz2.compress(LINES), BZIP2),
    ("a.jsonl", bz2.compress(LINES), BZIP2),
    ("a.jsonl.xz", lzma.compress(LINES), XZ),
    ("a.jsonl", gzip.compress(LINES), GZIP),
    ("a.txt", zstandard.compress(LINES), ZSTD),
    ("a.zip", zip_archive(LINES), ZIP),
    ("a.tar", tar_archive(LINES), TAR),
    ("a.tar.gz", gzip.compress(tar_archive(LINES)), TAR),
]
"""A file's name and content, and the words of the error."""


@pytest.mark.parametrize(("name", "content", "expected"), FOREIGN)
def test_a_file_of_another_format_is_named_as_the_cause(
    name: str, content: bytes, expected: str, tokenizer: str, source: Path, out: Path
) -> None:
    write(source / name, content)
    write(source / "good0.txt", TEXTS[0].encode())
    write(source / "good1.txt", TEXTS[1].encode())
    options = {"tokenizer": tokenizer, "pattern": "*", "val_fraction": 0.7}
    recipe = recipe_of("TextFiles", source, **options)

    message = rf"{re.escape(name)}.*: it is {re.escape(expected)}.*repair the file"
    with pytest.raises(UserError, match=message):
        make(out, recipe)

    manifest = make(out, recipe, skip_bad=True)
    assert manifest["skipped"]["wrong_format"]["count"] == 1
    assert manifest["documents"] == 2


def test_a_pointer_in_place_of_tokens(source: Path, out: Path) -> None:
    files = layouts.fineweb_bin(source, [[1, 2], [3]], tokens_per_file=3)
    files[1].write_bytes(LFS_POINTER)

    with pytest.raises(UserError, match=r"train_000001\.bin is a Git LFS pointer"):
        make(out, recipe_of("FineWebBin", source, tokenizer="none"))


def texts_of(path: Path) -> list[str | None]:
    """Return the text of each record of a file."""
    return [record.text for record in read_file(path.name, path, Columns())]


@pytest.mark.parametrize(
    "text", ["BZh is a name", "PK", "version 2", "\x00" * 20, "a\x00b\x00" * 3]
)
def test_a_text_that_only_begins_like_another_format_is_a_text(text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", text.encode())

    assert texts_of(path) == [text]


COMPRESS: dict[str, Compress] = {".gz": gzip.compress, ".zst": zstandard.compress}
each_compression = pytest.mark.parametrize(("ending", "compress"), COMPRESS.items())


@each_compression
@pytest.mark.parametrize("n_zeros", [1, 511, 100_000])
def test_zeros_after_compressed_data_are_no_damage(
    ending: str, compress: Compress, n_zeros: int, tmp_path: Path
) -> None:
    content = compress(LINES[:500]) + compress(LINES[500:])
    path = write(tmp_path / f"a.jsonl{ending}", content + bytes(n_zeros))

    assert texts_of(path) == TEXTS


@each_compression
@pytest.mark.parametrize("n_zeros", [1, 511, 100_000])
def test_zeros_before_compressed_data_are_damage(
    ending: str, compress: Compress, n_zeros: int, tmp_path: Path
) -> None:
    path = write(tmp_path / f"a.jsonl{ending}", bytes(n_zeros) + compress(LINES))

    *_, last = read_file(path.name, path, Columns())

    assert last.problem == "damaged"


@pytest.mark.parametrize(
    ("ending", "compress"),
    [
        (".ndjson", bytes),
        (".jsonlines", bytes),
        (".NDJSON", bytes),
        (".ndjson.gz", gzip.compress),
        (".jsonlines.zst", zstandard.compress),
    ],
)
def test_all_names_of_json_lines(
    ending: str, compress: Compress, tokenizer: str, source: Path, out: Path
) -> None:
    assert not is_one_text(f"a{ending}")
    write(source / f"a{ending}", compress(LINES))

    make(out, recipe_of("TextFiles", source, tokenizer=tokenizer, pattern="*"))

    assert all_texts(out) == sorted(TEXTS)


@pytest.mark.parametrize(("field", "text"), [("body.text", "whole"), ("body.deep.text", "deeper")])
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_names_of_fields_with_dots(field: str, text: str, ending: str, tmp_path: Path) -> None:
    """The complete name comes first; otherwise dots lead into nested fields."""
    values = {"body.text": "whole", "body": {"text": "nested", "deep": {"text": "deeper"}}}
    path = write(tmp_path / f"a{ending}", json.dumps(values).encode())
    if ending == ".parquet":
        pq.write_table(pa.Table.from_pylist([values]), path)

    (record,) = read_file(path.name, path, Columns(field))

    assert record.text == text
    assert record.problem is None


@pytest.mark.parametrize("trains", [True, False], ids=["bpe", "tokenizer.json"])
def test_a_wrong_text_field_is_noticed_first_and_the_fields_are_listed(
    trains: bool, tokenizer: str, source: Path, tmp_path: Path, capsys
) -> None:
    write(source / "a.jsonl", LINES)
    command = ["prepare", "TextFiles", "--source", str(source), "--pattern", "*.jsonl"]
    command += ["--text_field", "txt", "--output", str(tmp_path / "out")]
    command += ["--vocab_size", "300"] if trains else ["--tokenizer", tokenizer]

    assert main(command) == 2

    message = capsys.readouterr().err.splitlines()[-1]
    detail = 'the field "txt" is missing or null and not a string (its fields: text, meta)'
    assert f"a.jsonl, line 1: {detail}: repair" in message
    assert not trains or not (tmp_path / "out" / "tokenizer.json").exists()


def test_no_text_to_train_a_tokenizer_on(source: Path, out: Path) -> None:
    write(source / "a.jsonl", LINES)
    recipe = recipe_of("TextFiles", source, pattern="*.jsonl", text_field="txt")

    with pytest.raises(UserError, match=r"no text to train a tokenizer on: check .*--text_field"):
        make(out, recipe, skip_bad=True)


def test_a_tokenizer_with_another_end_token_names_the_option_of_prepare(
    tokenizer: str, source: Path, tmp_path: Path, capsys
) -> None:
    """As Llama 3's, which ends documents with <|end_of_text|>."""
    path = tmp_path / "llama3.json"
    path.write_bytes(Path(tokenizer).read_bytes())
    edit(path, lambda content: content["added_tokens"][0].update(content="<|end_of_text|>"))
    for number in range(3):
        write(source / f"{number}.txt", TEXTS[number].encode())
    command = ["prepare", "TextFiles", "--source", str(source), "--tokenizer", str(path)]
    command += ["--output", str(tmp_path / "out")]

    assert main(command) == 2

    message = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"special tokens: <\|end_of_text\|>\): set --end_of_document ", message)

    assert main([*command, "--end_of_document", "<|end_of_text|>"]) == 0
