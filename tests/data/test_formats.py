"""Reading source files: every record once and numbered, every fault named, nothing raised."""

import gzip
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from anlit.data.preparation.formats import Columns, Record, Span, format_of, read_bin_header, read_bin_tokens, read_file
from anlit.errors import UserError

SUBSET = "meta.redpajama_set_name"
COLUMNS = Columns(subset=SUBSET)
TEXTS = [
    *(f"document {number}\nwith {'many ' * (number % 30)}words" for number in range(200)),
    "größe 漢字 🦜 \u2028 \u0085 \x00 \r\n",
    "<|endoftext|>",
    "\ufeff",
    " ",
    "long " * 100_000,
    "last",
]


def subset_of(number: int) -> str:
    return f"RedPajama{number % 3}"


def json_line(number: int, text: str) -> bytes:
    record = {"text": text, "meta": {"redpajama_set_name": subset_of(number)}}
    return json.dumps(record, ensure_ascii=number % 2 == 0).encode() + b"\n"


def write_json_lines(path: Path) -> None:
    path.write_bytes(b"".join(json_line(number, text) for number, text in enumerate(TEXTS)))


def write_zstd(path: Path) -> None:
    """Two frames, the first without its size, and a line that begins in one and ends in the other."""
    data = b"".join(json_line(number, text) for number, text in enumerate(TEXTS))
    compressor = zstandard.ZstdCompressor().compressobj()
    first = compressor.compress(data[:5000]) + compressor.flush()
    path.write_bytes(first + zstandard.ZstdCompressor(write_checksum=True).compress(data[5000:]))


def write_gzip(path: Path) -> None:
    data = b"".join(json_line(number, text) for number, text in enumerate(TEXTS))
    path.write_bytes(gzip.compress(data[:5000]) + gzip.compress(data[5000:]))


def parquet_table(text_type: pa.DataType | None = None) -> pa.Table:
    names = [{"redpajama_set_name": subset_of(number), "other": number} for number in range(len(TEXTS))]
    return pa.table({"id": list(range(len(TEXTS))), "meta": names, "text": pa.array(TEXTS, text_type or pa.string())})


def write_parquet(path: Path) -> None:
    pq.write_table(parquet_table(), path, row_group_size=30)


WRITERS: dict[str, Callable[[Path], None]] = {
    ".jsonl": write_json_lines,
    ".jsonl.zst": write_zstd,
    ".jsonl.gz": write_gzip,
    ".parquet": write_parquet,
}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": bytes,
    ".jsonl.zst": zstandard.compress,
    ".jsonl.gz": gzip.compress,
}


def records(path: Path, columns: Columns = COLUMNS, span_bytes: int = 1 << 30) -> list[Record]:
    return list(read_file(path.name, path, span_bytes, columns))


def problems(found: list[Record]) -> list[tuple[str, str]]:
    return [(record.where, record.problem) for record in found if record.problem is not None]


@pytest.mark.parametrize("ending", WRITERS)
@pytest.mark.parametrize("span_bytes", [1, 700, 9000, 1 << 30])
def test_every_record_once(tmp_path: Path, ending: str, span_bytes: int) -> None:
    path = tmp_path / f"part_0{ending}"
    WRITERS[ending](path)
    found = records(path, span_bytes=span_bytes)
    assert [record.text for record in found] == TEXTS
    assert [record.index for record in found] == list(range(len(TEXTS)))
    unit = "row" if ending == ".parquet" else "line"
    assert [record.where for record in found] == [f"{unit} {number + 1}" for number in range(len(TEXTS))]
    assert [record.subset for record in found] == [subset_of(number) for number in range(len(TEXTS))]
    assert [record.size for record in found] == [len(text.encode()) for text in TEXTS]
    assert format_of(path.name).count(path) == len(TEXTS)


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
    (b"", "not_json", "the line is empty"),
    (b" \r", "not_json", "the line is empty"),
    (b"{}", "no_text_field", 'the field "text" is missing or null'),
    (b'{"text": null}', "no_text_field", 'the field "text" is missing or null'),
    (b'{"text": 7}', "no_text_field", 'the field "text" is a number and not a string'),
    (b'{"text": ["a"]}', "no_text_field", 'the field "text" is a list'),
    (b'{"text": ""}', "empty", "its text is empty"),
    ('{"text": "äääää"}'.encode(), "too_long", "has 10 bytes, more than --max-document-bytes 9"),
    (b'{"text": "aaaaaaaaaa"}', "too_long", "has 10 bytes, more than --max-document-bytes 9"),
]


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize(("line", "problem", "detail"), BAD_LINES, ids=lambda value: str(value)[:30])
def test_a_bad_line_costs_itself_only(tmp_path: Path, ending: str, line: bytes, problem: str, detail: str) -> None:
    path = tmp_path / f"a{ending}"
    path.write_bytes(COMPRESS[ending](b'{"text": "123456789"}\n' + line + b'\n{"text": "c"}'))
    first, bad, last = records(path, Columns(max_document_bytes=9))
    assert (first.text, last.text, last.where, last.index) == ("123456789", "c", "line 3", 2)
    assert (bad.where, bad.index, bad.text, bad.problem) == ("line 2", 1, None, problem)
    assert detail in bad.detail
    assert format_of(path.name).count(path) == 3


@pytest.mark.parametrize("ending", COMPRESS)
def test_an_empty_line_at_the_end_is_no_record(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    line = b'{"text": "a"}\n'
    for content, where in [
        (b"", []),
        (line, ["line 1"]),
        (line[:-1], ["line 1"]),
        (line + b"\n", ["line 1"]),
        (line + b"\n\n", ["line 1", "line 2"]),
        (b"\n\n" + line + b"\n", ["line 1", "line 2", "line 3"]),
    ]:
        path.write_bytes(COMPRESS[ending](content))
        for span_bytes in (1, 1 << 20):
            found = records(path, Columns(), span_bytes)
            assert [record.where for record in found] == where
            assert [record.where for record in found if record.problem] == [
                record.where for record in found if "is empty" in record.detail
            ]
        assert format_of(path.name).count(path) == len(where)


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
    assert "--max-document-bytes 1048576" in bad.detail
    assert peak < 24 << 20


@pytest.mark.parametrize("ending", [".jsonl.zst", ".jsonl.gz"])
def test_a_cut_file_gives_what_came_before_the_cut(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    WRITERS[ending](path)
    whole = path.read_bytes()
    delivered = set()
    for size in range(0, len(whole), len(whole) // 23):
        path.write_bytes(whole[:size])
        *good, last = records(path)
        assert [record.text for record in good] == TEXTS[: len(good)]
        assert (last.problem, last.where, last.index) == ("truncated", f"line {len(good) + 1}", len(good))
        assert ("is empty" if size == 0 else "in the middle of its compressed data") in last.detail
        assert format_of(path.name).count(path) == len(good)
        delivered.add(len(good))
    assert len(delivered) > 1


def test_an_empty_line_before_the_cut_still_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(b'{"text": "a"}\n\n') + zstandard.compress(b'{"text": "b"}\n')[:-3])
    assert problems(records(path, Columns())) == [("line 2", "not_json"), ("line 3", "truncated")]


@pytest.mark.parametrize("ending", [".jsonl.zst", ".jsonl.gz"])
def test_damaged_compressed_data(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    WRITERS[ending](path)
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


def row_group_middle(path: Path, group: int, column: str) -> int:
    """Byte in the middle of a column's data."""
    metadata = pq.read_metadata(path).row_group(group)
    chunk = next(c for c in map(metadata.column, range(metadata.num_columns)) if c.path_in_schema == column)
    return chunk.data_page_offset + chunk.total_compressed_size // 2


def overwrite(path: Path, position: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[position : position + len(data)] = data
    path.write_bytes(content)


@pytest.mark.parametrize("checksums", [False, True])
def test_a_broken_row_group_costs_its_own_rows(tmp_path: Path, checksums: bool) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(parquet_table(), path, row_group_size=30, write_page_checksum=checksums, use_dictionary=False)
    overwrite(path, row_group_middle(path, 3, "text"), b"\x5a" if checksums else b"\xff" * 60)
    found = records(path)
    (bad,) = [record for record in found if record.problem]
    assert (bad.where, bad.problem, bad.text) == ("row group 4", "damaged", None)
    lost = 120 - bad.index
    assert 90 <= bad.index < 120
    assert f"{lost} of its 30 rows are lost, from row {bad.index + 1}" in bad.detail
    good = [record for record in found if not record.problem]
    kept = [number for number in range(len(TEXTS)) if not bad.index <= number < 120]
    assert [record.index for record in good] == kept
    assert [record.text for record in good] == [TEXTS[number] for number in kept]


def test_a_broken_footer_costs_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path)
    whole = path.read_bytes()
    for content in (whole[:-5], whole[: len(whole) // 2], b"", b"PAR1", whole[:-200] + b"\xff" * 180 + whole[-20:]):
        path.write_bytes(content)
        (bad,) = records(path, span_bytes=1)
        assert (bad.where, bad.index, bad.problem) == ("the file", 0, "damaged")
        assert "no readable parquet footer (" in bad.detail
        assert format_of(path.name).count(path) == 0


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.binary()])
def test_parquet_texts_of_other_types(tmp_path: Path, kind: pa.DataType) -> None:
    path = tmp_path / "a.parquet"
    table = parquet_table()
    pq.write_table(table.set_column(2, "text", table["text"].cast(kind)), path)
    assert [record.text for record in records(path)] == TEXTS


def test_parquet_without_the_column_is_one_fault_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path)
    for columns, problem, detail in [
        (Columns("content"), "no_text_field", 'there is no column "content" (its columns: id, meta, text)'),
        (Columns("meta"), "no_text_field", 'the column "meta" has type struct'),
        (Columns("id"), "no_text_field", 'the column "id" has type int64 and not string'),
        (Columns(subset="meta.name"), "no_subset_field", 'there is no column "meta.name"'),
    ]:
        (bad,) = records(path, columns, span_bytes=1)
        assert (bad.where, bad.problem) == ("the file", problem)
        assert detail in bad.detail


def test_bad_parquet_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    values = pa.array([b"good", b"gr\xf6\xdfe", None, b"", b"far too long", b"good too"])
    pq.write_table(pa.table({"text": pa.Array.from_buffers(pa.string(), 6, values.buffers())}), path)
    assert pq.read_schema(path).field("text").type == pa.string()
    found = records(path, Columns(max_document_bytes=10))
    assert problems(found) == [
        ("row 2", "not_utf8"),
        ("row 3", "no_text_field"),
        ("row 4", "empty"),
        ("row 5", "too_long"),
    ]
    assert [record.text for record in found if record.text] == ["good", "good too"]


def test_null_structs_and_names_in_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    meta = pa.array([None, {"redpajama_set_name": None}, {"redpajama_set_name": ""}, {"redpajama_set_name": "C4"}])
    pq.write_table(pa.concat_tables([pa.table({"text": ["a", "b", "c", "d"], "meta": meta})] * 100), path)
    found = records(path)
    assert problems(found) == [(f"row {row}", "no_subset_field") for row in range(1, 401) if row % 4]
    assert {record.subset for record in found[3::4]} == {"C4"}


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
        assert (record.where, record.index, record.text, record.problem) == ("the file", 0, text, problem)
        assert format_of(path.name).count(path) == 1


def test_a_plain_file_above_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with open(path, "wb") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    try:
        assert problems(records(path, Columns(max_document_bytes=1 << 20))) == [("the file", "too_long")]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("ending", [*WRITERS, ".txt"])
def test_a_missing_file_is_an_os_error(tmp_path: Path, ending: str) -> None:
    path, reader = tmp_path / f"a{ending}", format_of(ending)
    with pytest.raises(FileNotFoundError):
        reader.spans(path, 1)
    with pytest.raises(FileNotFoundError):
        list(reader.read(path, Span(0, 1, 0), COLUMNS))
    with pytest.raises(FileNotFoundError):
        reader.count(path)


def write_tokens(path: Path, tokens: list[int], magic: int = 20240520, version: int = 1, count: int | None = None):
    header = [magic, version, len(tokens) if count is None else count] + [0] * 253
    content = b"".join(number.to_bytes(4, "little", signed=True) for number in header)
    path.write_bytes(content + b"".join(token.to_bytes(2, "little") for token in tokens))


def test_token_files(tmp_path: Path) -> None:
    path = tmp_path / "fineweb_train_000001.bin"
    write_tokens(path, [50256, 1, 65535, 256, 7])
    assert read_bin_header(path) == 5
    tokens = read_bin_tokens(path, 0, 5)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [50256, 1, 65535, 256, 7]
    assert read_bin_tokens(path, 2, 4).tolist() == [65535, 256]
    with pytest.raises(UserError, match=r"000001\.bin ends before token 6"):
        read_bin_tokens(path, 2, 6)
    write_tokens(path, [])
    assert read_bin_header(path) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": 20240521}, "begins with 20240521 instead of 20240520"),
        ({"version": 2}, "is a token file of version 2 and only version 1 is known"),
        ({"count": 4}, "has 1,030 bytes where the 4 tokens of its header make 1,032"),
        ({"count": 2}, "has 1,030 bytes where the 2 tokens of its header make 1,028"),
        ({"count": -1}, "has 1,030 bytes where the -1 tokens"),
    ],
)
def test_wrong_token_files_are_refused(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    path = tmp_path / "x.bin"
    write_tokens(path, [1, 2, 3], **changes)
    with pytest.raises(UserError, match=rf"x\.bin .*{message}"):
        read_bin_header(path)


def test_a_token_file_shorter_than_its_header(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(1023))
    with pytest.raises(UserError, match=r"x\.bin has 1,023 bytes, too few for the 1024"):
        read_bin_header(path)
