"""Reading source files: every record once and numbered, every fault named, nothing raised."""

import random
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anlit.data.preparation.formats import Columns, holds_many, parts_of, read_file
from tests.data.source_files import (
    COMPRESS,
    TEXTS,
    WRITERS,
    json_line,
    problems,
    records,
    subset_of,
    write_gzip,
    write_zstd,
)


@pytest.mark.parametrize("ending", WRITERS)
@pytest.mark.parametrize("part_bytes", [900, 9000, 1 << 30])
def test_every_record_once(tmp_path: Path, ending: str, part_bytes: int) -> None:
    path = tmp_path / f"part_0{ending}"
    WRITERS[ending](path)
    found = records(path, part_bytes=part_bytes)
    assert [record.text for record in found] == TEXTS
    unit = "row" if ending == ".parquet" else "line"
    assert [record.where for record in found] == [f"{unit} {number + 1}" for number in range(len(TEXTS))]
    assert [record.subset for record in found] == [subset_of(number) for number in range(len(TEXTS))]
    assert [record.size for record in found] == [len(text.encode()) for text in TEXTS]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_part_is_read_without_the_others(tmp_path: Path, ending: str) -> None:
    """Each in proportion to its bytes: so a large file is shared by many workers."""
    path = tmp_path / f"a{ending}"
    texts = [f"{number} " + "".join(random.Random(number).choices("abcdefgh", k=500)) for number in range(400)]
    if ending == ".jsonl":
        path.write_bytes(b"".join(json_line(number, text) for number, text in enumerate(texts)))
    else:
        pq.write_table(pa.table({"text": texts}), path, row_group_size=10)
    size = path.stat().st_size
    parts = parts_of(path.name, size, size // 8)
    assert parts == 8
    numbers = [
        [int(r.text.split()[0]) for r in read_file(path.name, path, Columns(), part, parts)] for part in range(8)
    ]
    assert [number for part in numbers for number in part] == list(range(400))
    assert all(35 <= len(part) <= 65 for part in numbers)


def test_files_that_cannot_be_entered_in_the_middle_have_one_part() -> None:
    for name in ("a.jsonl.zst", "a.json.gz", "a.txt"):
        assert parts_of(name, 1 << 40, 1 << 20) == 1
    assert parts_of("a.JSONL", 10 << 20, 1 << 20) == 10


def test_a_fault_in_a_late_part_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json_line(number, text) for number, text in enumerate(TEXTS)]
    path.write_bytes(b"".join([*lines[:150], b"not JSON\n", *lines[150:]]))
    assert problems(records(path, part_bytes=2000)) == [("line 151", "not_json")]


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


def test_the_format_follows_from_the_name() -> None:
    names = ("x.JSONL.zst", "b.jsonl", "c.parquet", "d.md", "e.json.gz", "f.json", "g.txt.gz")
    assert [name for name in names if holds_many(name)] == ["x.JSONL.zst", "b.jsonl", "c.parquet", "e.json.gz"]


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
@pytest.mark.parametrize(("line", "problem", "detail"), BAD_LINES, ids=lambda value: str(value)[:30])
def test_a_bad_line_costs_itself_only(tmp_path: Path, ending: str, line: bytes, problem: str, detail: str) -> None:
    path = tmp_path / f"a{ending}"
    path.write_bytes(COMPRESS[ending](b'{"text": "123456789"}\n' + line + b'\n{"text": "c"}'))
    first, bad, last = records(path, Columns(max_document_bytes=9))
    assert (first.text, last.text, last.where) == ("123456789", "c", "line 3")
    assert (bad.where, bad.text, bad.problem) == ("line 2", None, problem)
    assert detail in bad.detail


def test_blank_lines_are_no_documents_and_count(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"text": "a"}\n \r\n{"text": "b"}\n\n')
    for part_bytes in (1, 9, 1 << 20):
        assert [record.where for record in records(path, Columns(), part_bytes)] == ["line 2", "line 4"]


def test_byte_order_mark_and_carriage_returns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    assert [record.text for record in records(path, Columns())] == ["a", "b"]


def test_a_missing_subset_is_a_fault_only_where_subsets_are_wanted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a", "meta": {}}\n{"text": "b", "meta": "text"}\n')
    assert problems(records(path)) == [("line 1", "no_subset_field"), ("line 2", "no_subset_field")]
    assert problems(records(path, Columns())) == []


def test_a_line_far_above_the_limit_is_not_kept_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"text": "a"}\n{"text": "')
        for _ in range(64):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n{"text": "c"}\n')
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


@pytest.mark.parametrize(("ending", "write"), [(".zst", write_zstd), (".gz", write_gzip)])
def test_a_cut_file_gives_what_came_before_the_cut(tmp_path: Path, ending: str, write: Callable[[Path], None]) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    write(path)
    whole = path.read_bytes()
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
    write_zstd(path)
    whole = path.read_bytes()
    path.write_bytes(whole + b"something else")
    *good, last = records(path)
    assert [record.text for record in good] == TEXTS
    assert (last.problem, last.where) == ("damaged", f"line {len(TEXTS) + 1}")
    assert re.search(r"damaged before byte [\d,]+ \(.+\)", last.detail)
    path.write_bytes(whole[:-4] + bytes(4))  # the checksum of all
    assert problems(records(path))[-1][1] == "damaged"
    path.write_bytes(b"not compressed")
    assert problems(records(path)) == [("line 1", "damaged")]


def test_plain_text_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for content, text, problem in [
        (b"a\r\nb\n\xc3\xa4", "a\r\nb\nä", None),
        (b"", None, "empty"),
        (b"gr\xf6\xdfe", None, "not_utf8"),
        (b"x" * 21, None, "too_long"),
    ]:
        path.write_bytes(content)
        (record,) = records(path, Columns(max_document_bytes=20), part_bytes=1)
        assert (record.where, record.text, record.problem) == ("the file", text, problem)
