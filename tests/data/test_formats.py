"""Reading source files: every record once and numbered, every fault named, nothing raised."""

import re
import tracemalloc
from pathlib import Path

import pytest

from anlit.data.preparation.formats import Columns, Span, format_of
from tests.data.source_files import (
    COLUMNS,
    COMPRESS,
    TEXTS,
    WRITERS,
    problems,
    records,
    subset_of,
    write_json_lines,
    write_parquet,
    write_zstd,
)


@pytest.mark.parametrize("ending", WRITERS)
@pytest.mark.parametrize("span_bytes", [1, 700, 9000, 1 << 30])
def test_every_record_once(tmp_path: Path, ending: str, span_bytes: int) -> None:
    path = tmp_path / f"part_0{ending}"
    WRITERS[ending](path)
    found = records(path, span_bytes=span_bytes)
    assert [record.text for record in found] == TEXTS
    unit = "row" if ending == ".parquet" else "line"
    assert [record.where for record in found] == [f"{unit} {number + 1}" for number in range(len(TEXTS))]
    assert [record.subset for record in found] == [subset_of(number) for number in range(len(TEXTS))]
    assert [record.size for record in found] == [len(text.encode()) for text in TEXTS]


def test_spans_cover_a_file_in_pieces_of_about_the_size_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_json_lines(path)
    spans = format_of(path.name).spans(path, 2000)
    content = path.read_bytes()
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == len(content)
    for span in spans[:-1]:
        last_line = content.rindex(b"\n", 0, span.stop - 1) + 1
        assert last_line < span.start + 2000 <= span.stop
    groups = tmp_path / "a.parquet"
    write_parquet(groups)
    assert len(format_of(groups.name).spans(groups, 1)) == -(-len(TEXTS) // 30)
    middle = format_of(groups.name).spans(groups, 1)[2]
    assert middle == Span(2, 3, 60)
    assert next(iter(format_of(groups.name).read(groups, middle, COLUMNS))).text == TEXTS[60]


def test_the_format_follows_from_the_name() -> None:
    kinds = {name: type(format_of(name)).__name__ for name in ("train/x.JSONL.zst", "b.jsonl", "c.parquet", "d.md")}
    assert list(kinds.values()) == ["ZstdJsonLines", "JsonLines", "Parquet", "PlainText"]


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
    for span_bytes in (1, 1 << 20):
        assert [record.where for record in records(path, Columns(), span_bytes)] == ["line 2", "line 4"]


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
        first, bad, last = records(path, Columns(max_document_bytes=1 << 20), span_bytes=1 << 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (first.text, last.text, last.where) == ("a", "c", "line 3")
    assert (bad.where, bad.problem) == ("line 2", "too_long")
    assert "--max_document_bytes 1048576" in bad.detail
    assert peak < 24 << 20


def test_a_cut_file_gives_what_came_before_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    write_zstd(path)
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
        (record,) = records(path, Columns(max_document_bytes=20), span_bytes=1)
        assert (record.where, record.text, record.problem) == ("the file", text, problem)
