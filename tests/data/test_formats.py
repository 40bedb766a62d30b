"""Reading source files: every record once and numbered, every fault named, nothing raised."""

import gzip
import json
import random
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from anlit.data.preparation.formats import Columns, Record, holds_many, parts_of, read_bin_tokens, read_file
from anlit.errors import UserError
from tests.data.layouts import bin_tokens

COLUMNS = Columns(subset="meta.redpajama_set_name")
TEXTS = [
    *(f"document {number}\nwith {'many ' * (number % 30)}words" for number in range(200)),
    *("größe 漢字 🦜 \u2028 \u0085 \x00 \r\n", "<|endoftext|>", "\ufeff", " ", "long " * 100_000, "last"),
]
NAMES = [f"RedPajama{number % 3}" for number in range(len(TEXTS))]


def json_line(number: int, text: str) -> bytes:
    record = {"text": text, "meta": {"redpajama_set_name": NAMES[number % 3]}}
    return json.dumps(record, ensure_ascii=number % 2 == 0).encode() + b"\n"


LINES = b"".join(json_line(number, text) for number, text in enumerate(TEXTS))
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": bytes,
    ".jsonl.zst": lambda content: zstandard.ZstdCompressor(write_checksum=True).compress(content),
    ".jsonl.gz": gzip.compress,
}
# Two frames, and a line that begins in one and ends in the other; the first zstd frame does not know its size.
COMPRESSOR = zstandard.ZstdCompressor().compressobj()
ZSTD = COMPRESSOR.compress(LINES[:5000]) + COMPRESSOR.flush() + COMPRESS[".jsonl.zst"](LINES[5000:])
GZIP = gzip.compress(LINES[:5000]) + gzip.compress(LINES[5000:])


def parquet_table() -> pa.Table:
    names = [{"redpajama_set_name": name, "other": number} for number, name in enumerate(NAMES)]
    return pa.table({"id": list(range(len(TEXTS))), "meta": names, "text": pa.array(TEXTS, pa.string())})


def write_all(path: Path) -> Path:
    """All texts in a file of the format that its name says."""
    if path.suffix == ".parquet":
        pq.write_table(parquet_table(), path, row_group_size=30)
    else:
        path.write_bytes({".jsonl": LINES, ".zst": ZSTD, ".gz": GZIP}[path.suffix])
    return path


def records(path: Path, columns: Columns = COLUMNS, part_bytes: int = 1 << 30) -> list[Record]:
    """Of all parts of a file, one after the other."""
    parts = parts_of(path.name, path.stat().st_size, part_bytes)
    return [record for part in range(parts) for record in read_file(path.name, path, columns, part, parts)]


def problems(read: list[Record]) -> list[tuple[str, str]]:
    return [(record.where, record.problem) for record in read if record.problem is not None]


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.zst", ".json.gz", ".parquet"])
@pytest.mark.parametrize("part_bytes", [900, 9000, 1 << 30])
def test_every_record_once(tmp_path: Path, ending: str, part_bytes: int) -> None:
    read = records(write_all(tmp_path / f"part_0{ending}"), part_bytes=part_bytes)
    unit = "row" if ending == ".parquet" else "line"
    assert [(record.text, record.subset, record.where, record.size) for record in read] == [
        (text, name, f"{unit} {number + 1}", len(text.encode()))
        for number, (text, name) in enumerate(zip(TEXTS, NAMES, strict=True))
    ]


def test_parts_of_a_parquet_file_are_read_without_the_others(tmp_path: Path) -> None:
    """Each in proportion to its bytes: so a large file is shared by many workers."""
    path = tmp_path / "a.parquet"
    texts = [f"{number} " + "".join(random.Random(number).choices("abcdefgh", k=500)) for number in range(400)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=10)
    read = [[r.text for r in read_file(path.name, path, Columns(), part, 8)] for part in range(8)]
    assert [text for part in read for text in part] == texts
    assert all(35 <= len(part) <= 65 for part in read)


def test_the_format_follows_from_the_name() -> None:
    names = ("x.JSONL.zst", "b.jsonl", "c.parquet", "d.md", "e.json.gz", "f.json", "g.txt.gz")
    assert [name for name in names if holds_many(name)] == ["x.JSONL.zst", "b.jsonl", "c.parquet", "e.json.gz"]
    in_parts = [name for name in (*names, "a.JSONL") if parts_of(name, 10 << 20, 1 << 20) == 10]
    assert in_parts == ["b.jsonl", "c.parquet", "a.JSONL"]  # the others cannot be entered in the middle


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_text_is_one_document(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(COMPRESS[f".jsonl{ending}"](b"a\nb"))
    (record,) = records(path, Columns())
    assert (record.text, record.where) == ("a\nb", "the file")
    path.write_bytes(path.read_bytes()[:-3])
    assert problems(records(path, Columns())) == [("the file", "truncated")]
    path.write_bytes(COMPRESS[f".jsonl{ending}"](bytes(100 << 20)))
    assert problems(records(path, Columns(max_document_bytes=1 << 20))) == [("the file", "too_long")]


BAD_LINES = [
    (b'{"text": "gr\xf6\xdfe"}', "not_utf8", "byte 0xf6 at position 13 is not valid UTF-8"),
    (rb'{"text": "\ud800 x"}', "not_utf8", "half of a surrogate pair"),
    (b'{"text": "cut', "not_json", "the line is not JSON (Unterminated string"),
    (b"[" * 100_000, "not_json", "the line is not JSON ("),
    (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "not_json", "the line is not JSON ("),
    (b'["text"]', "not_json", "not a JSON object"),
    (b"{}", "no_text_field", 'the field "text" is missing or null'),
    (b'{"text": null}', "no_text_field", 'the field "text" is missing or null'),
    (b'{"text": 7}', "no_text_field", 'the field "text" is a number and not a string'),
    (b'{"text": ["a"]}', "no_text_field", 'the field "text" is a list'),
    (b'{"text": ""}', "empty", "its text is empty"),
    ('{"text": "äääää"}'.encode(), "too_long", "has 10 bytes, more than --max_document_bytes 9"),
    (b'{"text": "aaaaaaaaaa"}', "too_long", "has 10 bytes, more than --max_document_bytes 9"),
]


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_bad_line_costs_itself_only(tmp_path: Path, ending: str) -> None:
    path, good = tmp_path / f"a{ending}", b'{"text": "123456789"}\n'
    path.write_bytes(COMPRESS[ending](b"".join(good + line + b"\n" for line, _, _ in BAD_LINES) + good))
    read = records(path, Columns(max_document_bytes=9))
    assert [record.text for record in read[::2]] == ["123456789"] * (len(BAD_LINES) + 1)
    assert read[-1].where == f"line {2 * len(BAD_LINES) + 1}"
    for number, (bad, (_, problem, detail)) in enumerate(zip(read[1::2], BAD_LINES, strict=True), 1):
        assert (bad.where, bad.text, bad.problem) == (f"line {2 * number}", None, problem)
        assert detail in bad.detail


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'\n{"text": "a"}\n \r\n{"text": "b"}\n\n', [("line 2", "a"), ("line 4", "b")]),  # blank lines count
        (b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n', [("line 1", "a"), ("line 2", "b")]),
    ],
)
def test_blank_lines_marks_and_carriage_returns_are_no_text(
    tmp_path: Path, content: bytes, expected: list[tuple[str, str]]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    for part_bytes in (1, 9, 1 << 20):
        read = records(tmp_path / "a.jsonl", Columns(), part_bytes)
        assert [(record.where, record.text) for record in read] == expected


def test_a_missing_subset_is_a_fault_only_where_subsets_are_wanted(tmp_path: Path) -> None:
    lines, rows = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    lines.write_bytes(b'{"text": "a", "meta": {}}\n{"text": "b", "meta": "text"}\n')
    assert problems(records(lines)) == [("line 1", "no_subset_field"), ("line 2", "no_subset_field")]
    assert problems(records(lines, Columns())) == []
    meta = pa.array([None, {"redpajama_set_name": None}, {"redpajama_set_name": ""}, {"redpajama_set_name": "C4"}])
    pq.write_table(pa.concat_tables([pa.table({"text": ["a", "b", "c", "d"], "meta": meta})] * 100), rows)
    read = records(rows)
    assert problems(read) == [(f"row {row}", "no_subset_field") for row in range(1, 401) if row % 4]
    assert {record.subset for record in read[3::4]} == {"C4"}


def test_a_line_far_above_the_limit_is_not_kept_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "' + (64 << 20) * b"x" + b'"}\n{"text": "c"}\n')
    tracemalloc.start()
    try:
        first, bad, last = records(path, Columns(max_document_bytes=1 << 20), part_bytes=24 << 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (first.text, last.text, last.where) == ("a", "c", "line 3")
    assert (bad.where, bad.problem) == ("line 2", "too_long")
    assert "--max_document_bytes 1048576" in bad.detail
    assert peak < 24 << 20


@pytest.mark.parametrize(("ending", "whole"), [(".zst", ZSTD), (".gz", GZIP)])
def test_a_cut_file_gives_what_came_before_the_cut(tmp_path: Path, ending: str, whole: bytes) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    delivered = set()
    for size in range(0, len(whole), len(whole) // 23):
        path.write_bytes(whole[:size])
        *good, last = records(path)
        assert [record.text for record in good] == TEXTS[: len(good)]
        assert (last.problem, last.where) == ("truncated", f"line {len(good) + 1}")
        assert ("is empty" if size == 0 else "in the middle of its compressed data") in last.detail
        delivered.add(len(good))
    assert len(delivered) > 1


def test_damaged_compressed_data(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(ZSTD + b"something else")
    *good, last = records(path)
    assert [record.text for record in good] == TEXTS
    assert (last.problem, last.where) == ("damaged", f"line {len(TEXTS) + 1}")
    assert re.search(r"damaged before byte [\d,]+ \(.+\)", last.detail)
    path.write_bytes(ZSTD[:-4] + bytes(4))  # the checksum of all
    assert problems(records(path))[-1][1] == "damaged"
    path.write_bytes(b"not compressed")
    assert problems(records(path)) == [("line 1", "damaged")]


def test_plain_text_is_one_document(tmp_path: Path) -> None:
    for content, text, problem in (
        (b"a\r\nb\n\xc3\xa4", "a\r\nb\nä", None),
        (b"", None, "empty"),
        (b"gr\xf6\xdfe", None, "not_utf8"),
        (b"x" * 21, None, "too_long"),
    ):
        (tmp_path / "a.txt").write_bytes(content)
        (record,) = records(tmp_path / "a.txt", Columns(max_document_bytes=20), part_bytes=1)
        assert (record.where, record.text, record.problem) == ("the file", text, problem)


@pytest.mark.parametrize("checksums", [False, True])
def test_a_broken_row_group_costs_its_own_rows(tmp_path: Path, checksums: bool) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(parquet_table(), path, row_group_size=30, write_page_checksum=checksums, use_dictionary=False)
    group = pq.read_metadata(path).row_group(3)
    text = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == "text")
    middle, content = text.data_page_offset + text.total_compressed_size // 2, bytearray(path.read_bytes())
    damage = b"\x5a" if checksums else b"\xff" * 60
    content[middle : middle + len(damage)] = damage
    path.write_bytes(content)
    read = records(path)
    (bad,) = [record for record in read if record.problem]
    assert (bad.where, bad.problem, bad.text) == ("row group 4", "damaged", None)
    lost = len(TEXTS) - len(read) + 1
    assert 0 < lost <= 30
    assert f"{lost} of its 30 rows are lost, from row {121 - lost}" in bad.detail
    kept = [number for number in range(len(TEXTS)) if not 120 - lost <= number < 120]
    good = [record for record in read if not record.problem]
    assert [(record.where, record.text) for record in good] == [(f"row {n + 1}", TEXTS[n]) for n in kept]


def test_a_broken_footer_costs_the_file(tmp_path: Path) -> None:
    path = write_all(tmp_path / "a.parquet")
    whole = path.read_bytes()
    for content in (whole[:-5], whole[: len(whole) // 2], b"", b"PAR1", whole[:-200] + b"\xff" * 180 + whole[-20:]):
        path.write_bytes(content)
        (bad,) = records(path, part_bytes=9000)
        assert (bad.where, bad.problem) == ("the file", "damaged")
        assert "no readable parquet footer (" in bad.detail


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.binary()])
def test_parquet_texts_of_other_types(tmp_path: Path, kind: pa.DataType) -> None:
    path, table = tmp_path / "a.parquet", parquet_table()
    pq.write_table(table.set_column(2, "text", table["text"].cast(kind)), path)
    assert [record.text for record in records(path)] == TEXTS


@pytest.mark.parametrize(
    ("columns", "problem", "detail"),
    [
        (Columns("content"), "no_text_field", 'there is no column "content" (its columns: id, meta, text)'),
        (Columns("meta"), "no_text_field", 'the column "meta" has type struct'),
        (Columns("id"), "no_text_field", 'the column "id" has type int64 and not string'),
        (Columns(subset="meta.name"), "no_subset_field", 'there is no column "meta.name"'),
    ],
)
def test_parquet_without_the_column_is_one_fault_a_file(
    columns: Columns, problem: str, detail: str, tmp_path: Path
) -> None:
    (bad,) = records(write_all(tmp_path / "a.parquet"), columns, part_bytes=9000)
    assert (bad.where, bad.problem) == ("the file", problem)
    assert detail in bad.detail


def test_bad_parquet_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    values = pa.array([b"good", b"gr\xf6\xdfe", None, b"", b"far too long", b"good too"])
    pq.write_table(pa.table({"text": pa.Array.from_buffers(pa.string(), 6, values.buffers())}), path)
    assert pq.read_schema(path).field("text").type == pa.string()
    read = records(path, Columns(max_document_bytes=10))
    expected = ["not_utf8", "no_text_field", "empty", "too_long"]
    assert problems(read) == [(f"row {row}", problem) for row, problem in enumerate(expected, 2)]
    assert [record.text for record in read if record.text] == ["good", "good too"]


def test_token_files(tmp_path: Path) -> None:
    path = tmp_path / "fineweb_train_000001.bin"
    for tokens, parts in (([50256, 1, 65535, 256, 7], [[50256, 1], [65535, 256, 7]]), ([], [[], []])):
        path.write_bytes(bin_tokens(tokens))
        assert read_bin_tokens(path).dtype == np.uint16
        assert read_bin_tokens(path).tolist() == tokens
        assert [read_bin_tokens(path, part, 2).tolist() for part in (0, 1)] == parts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bin_tokens([1, 2, 3], magic=20240521), r"begins with \[20240521, 1\] instead of \[20240520, 1\]"),
        (bin_tokens([1, 2, 3], version=2), r"begins with \[20240520, 2\]"),
        (bin_tokens([1, 2, 3], count=4), "has 1,030 bytes where the 4 tokens of its header make 1,032"),
        (bin_tokens([1, 2, 3], count=-1), "has 1,030 bytes where the -1 tokens"),
        (bytes(1023), "is not a file of tokens, it has 1,023 bytes"),
    ],
)
def test_wrong_token_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(UserError, match=rf"x\.bin .*{message}"):
        read_bin_tokens(tmp_path / "x.bin")
