"""Reading source files: every record once and numbered, every fault named, nothing raised."""

import gzip
import json
import random
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from anlit.data.preparation.formats import Columns, Record, is_one_text, n_pieces_of, read_file

COLUMNS = Columns(subset="meta.redpajama_set_name")
TEXTS = [
    *(f"document {number}\nwith {'many ' * (number % 30)}words" for number in range(200)),
    *(
        "größe 漢字 🦜 \u2028 \u0085 \x00 \r\n",
        "<|endoftext|>",
        "\ufeff",
        " ",
        "long " * 100_000,
        "last",
    ),
]
NAMES = [f"RedPajama{number % 3}" for number in range(len(TEXTS))]
LINES = b"".join(
    json.dumps(
        {"text": text, "meta": {"redpajama_set_name": name}}, ensure_ascii=number % 2 == 0
    ).encode()
    + b"\n"
    for number, (text, name) in enumerate(zip(TEXTS, NAMES, strict=True))
)
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress,
    ".zst": lambda content: zstandard.ZstdCompressor(write_checksum=True).compress(content),
}  # fmt: skip
# Two frames, and a line that begins in one and ends in the other; the first zstd frame does not know its size.
COMPRESSOR = zstandard.ZstdCompressor().compressobj()
ZSTD = COMPRESSOR.compress(LINES[:5000]) + COMPRESSOR.flush() + COMPRESS[".zst"](LINES[5000:])
GZIP = gzip.compress(LINES[:5000]) + gzip.compress(LINES[5000:])


def parquet_table() -> pa.Table:
    """With texts of a type that is not plain strings."""
    names = [{"redpajama_set_name": name, "other": number} for number, name in enumerate(NAMES)]
    texts = pa.array(TEXTS, pa.string()).dictionary_encode()
    return pa.table({"id": list(range(len(TEXTS))), "meta": names, "text": texts})


def write_all(path: Path) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(parquet_table(), path, row_group_size=30)
    else:
        path.write_bytes({".json": LINES, ".jsonl": LINES, ".zst": ZSTD, ".gz": GZIP}[path.suffix])
    return path


def records(path: Path, columns: Columns = COLUMNS, part_bytes: int = 1 << 30) -> list[Record]:
    parts = n_pieces_of(path.name, path.stat().st_size, part_bytes)
    return [
        record
        for part in range(parts)
        for record in read_file(path.name, path, columns, part, parts)
    ]


@pytest.mark.parametrize(("ending", "part_bytes"), [
    (".json", 900), (".jsonl", 900), (".jsonl", 9000), (".jsonl", 1 << 30), (".jsonl.zst", 900), (".json.gz", 900),
    (".parquet", 900), (".parquet", 1 << 30),
])  # fmt: skip
def test_every_record_once(tmp_path: Path, ending: str, part_bytes: int) -> None:
    read = records(write_all(tmp_path / f"part_0{ending}"), part_bytes=part_bytes)
    unit = "row" if ending == ".parquet" else "line"
    numbered = enumerate(zip(TEXTS, NAMES, strict=True), 1)
    written = [
        (text, name, f"{unit} {number}", len(text.encode())) for number, (text, name) in numbered
    ]
    assert [(record.text, record.subset, record.location, record.size) for record in read] == written


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_parts_are_in_proportion_to_their_bytes(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    texts = [
        f"{number} " + "".join(random.Random(number).choices("abcdefgh", k=500))
        for number in range(400)
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    if ending == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=10)
    read = [[r.text for r in read_file(path.name, path, Columns(), part, 8)] for part in range(8)]
    assert [text for part in read for text in part] == texts
    assert all(35 <= len(part) <= 65 for part in read)


def test_the_format_follows_from_the_name() -> None:
    in_parts = [
        "b.jsonl",
        "c.parquet",
        "a.JSONL",
        "f.json",
    ]  # the others cannot be entered in the middle
    names = [*in_parts, "x.JSONL.zst", "e.json.gz", "g.txt.gz", "d.md", "json"]
    assert [name for name in names if is_one_text(name)] == ["d.md", "json"]
    assert [name for name in names if n_pieces_of(name, 10 << 20, 1 << 20) == 10] == in_parts


@pytest.mark.parametrize(("content", "text", "problem"), [
    (b"a\r\nb\n\xc3\xa4", "a\r\nb\nä", None), (b"", None, "empty"), (b"gr\xf6\xdfe", None, "not_utf8"),
    (b"\xef\xbb\xbfa", "a", None), (b"\xef\xbb\xbf", None, "empty"), (bytes(100 << 20), None, "too_long"),
])  # fmt: skip
@pytest.mark.parametrize("ending", COMPRESS)
def test_plain_text_is_one_document(
    tmp_path: Path, ending: str, content: bytes, text: Any, problem: Any
) -> None:
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(COMPRESS[ending](content))
    (record,) = records(path, Columns(max_document_bytes=20), part_bytes=1)
    assert (record.location, record.text, record.problem) == ("the file", text, problem)
    if ending and text:
        path.write_bytes(path.read_bytes()[:-3])
        assert [(record.location, record.problem) for record in records(path)] == [
            ("the file", "truncated")
        ]


BAD_LINES = [
    (
        b'{"text": "gr\xf6\xdfe"}',
        "not_utf8",
        "it is not UTF-8 ('utf-8' codec can't decode byte 0xf6 in position 12",
    ),
    (
        rb'{"text": "\ud800 x"}',
        "not_utf8",
        "it is not UTF-8 ('utf-8' codec can't encode character '\\ud800'",
    ),
    (b'{"text": "cut', "not_json", "the line is not JSON (Unterminated string"),
    (b"[" * 100_000, "not_json", "the line is not JSON ("),
    (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "not_json", "the line is not JSON ("),
    (b'[{"text": "a"}, {"text": "b"}]', "not_json", "not a JSON object, each has to be one"),
    (b"{}", "no_text_field", 'the field "text" is missing or null and not a string'),
    (b'{"text": null}', "no_text_field", 'the field "text" is missing or null'),
    (b'{"text": ["a"]}', "no_text_field", "the field \"text\" is ['a'] and not a string"),
    (b'{"text": ""}', "empty", "its text is empty"),
    ('{"text": "äääää"}'.encode(), "too_long", "has 10 bytes, more than --max_document_bytes 9"),
]


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_bad_line_costs_itself_only(tmp_path: Path, ending: str) -> None:
    path, good = tmp_path / f"a.jsonl{ending}", b'{"text": "123456789"}\n'
    path.write_bytes(
        COMPRESS[ending](b"".join(good + line + b"\n" for line, _, _ in BAD_LINES) + good)
    )
    read = records(path, Columns(max_document_bytes=9))
    assert [record.text for record in read[::2]] == ["123456789"] * (len(BAD_LINES) + 1)
    assert read[-1].location == f"line {2 * len(BAD_LINES) + 1}"
    for number, (bad, (_, problem, detail)) in enumerate(
        zip(read[1::2], BAD_LINES, strict=True), 1
    ):
        assert (bad.location, bad.text, bad.problem) == (f"line {2 * number}", None, problem)
        assert detail in bad.detail


@pytest.mark.parametrize("part_bytes", [1, 9, 1 << 20])
def test_blank_lines_marks_and_carriage_returns_are_no_text(
    tmp_path: Path, part_bytes: int
) -> None:
    for content, expected in (
        (
            b'\n{"text": "a"}\n \r\n{"text": "b"}\n\n',
            [("line 2", "a"), ("line 4", "b")],
        ),  # blank lines count
        (b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n', [("line 1", "a"), ("line 2", "b")]),
    ):
        (tmp_path / "a.jsonl").write_bytes(content)
        read = records(tmp_path / "a.jsonl", Columns(), part_bytes)
        assert [(record.location, record.text) for record in read] == expected


def test_a_line_far_above_the_limit_is_not_kept_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "' + (64 << 20) * b"x" + b'"}\n{"text": "c"}\n')
    tracemalloc.start()
    try:
        first, bad, last = records(path, Columns(max_document_bytes=1 << 20), part_bytes=24 << 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (first.text, last.text, last.location) == ("a", "c", "line 3")
    assert (bad.location, bad.problem) == ("line 2", "too_long")
    assert bad.detail == "it has 67,108,876 bytes, more than --max_document_bytes 1048576"
    assert peak < 24 << 20


@pytest.mark.parametrize(("ending", "whole"), [(".zst", ZSTD), (".gz", GZIP)])
def test_a_cut_file_gives_what_came_before_the_cut(
    tmp_path: Path, ending: str, whole: bytes
) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    delivered = set()
    for size in range(0, len(whole), len(whole) // 23):
        path.write_bytes(whole[:size])
        *good, last = records(path)
        assert [record.text for record in good] == TEXTS[: len(good)]
        assert (last.problem, last.location) == ("truncated", f"line {len(good) + 1}")
        assert ("is empty" if size == 0 else "in the middle of its compressed data") in last.detail
        delivered.add(len(good))
    assert len(delivered) > 1


def test_damaged_compressed_data(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    for content in (
        ZSTD + b"something else",
        ZSTD[:-4] + bytes(4),
        b"not compressed",
    ):  # the second: a checksum
        path.write_bytes(content)
        *good, last = records(path)
        assert [record.text for record in good] == TEXTS[: len(good)]
        assert (last.problem, last.location) == ("damaged", f"line {len(good) + 1}")
        assert re.search(r"damaged before byte [\d,]+ \(.+\)", last.detail)


@pytest.mark.parametrize("checksums", [False, True])
def test_a_broken_row_group_costs_its_own_rows(tmp_path: Path, checksums: bool) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        parquet_table(),
        path,
        row_group_size=30,
        write_page_checksum=checksums,
        use_dictionary=False,
    )
    group = pq.read_metadata(path).row_group(3)
    text = next(
        c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == "text"
    )
    middle, content = (
        text.data_page_offset + text.total_compressed_size // 2,
        bytearray(path.read_bytes()),
    )
    damage = b"\x5a" if checksums else b"\xff" * 60
    content[middle : middle + len(damage)] = damage
    path.write_bytes(content)
    read = records(path)
    (bad,) = [record for record in read if record.problem]
    assert (bad.location, bad.problem, bad.text) == ("row group 4", "damaged", None)
    lost = len(TEXTS) - len(read) + 1
    assert 0 < lost <= 30
    assert f"{lost} of its 30 rows are lost, from row {121 - lost}" in bad.detail
    kept = [number for number in range(len(TEXTS)) if not 120 - lost <= number < 120]
    good = [record for record in read if not record.problem]
    assert [(record.location, record.text) for record in good] == [
        (f"row {n + 1}", TEXTS[n]) for n in kept
    ]


def test_a_broken_footer_costs_the_file(tmp_path: Path) -> None:
    path = write_all(tmp_path / "a.parquet")
    whole = path.read_bytes()
    for content in (whole[:-5], b"", whole[:-200] + b"\xff" * 180 + whole[-20:]):
        path.write_bytes(content)
        (bad,) = records(path, part_bytes=9000)
        assert (bad.location, bad.problem) == ("the file", "damaged")
        assert "no readable parquet footer (" in bad.detail


@pytest.mark.parametrize(("columns", "problem", "missing"), [
    (Columns("content"), "no_text_field", "content"), (Columns("meta"), "no_text_field", "meta"),
    (Columns("id"), "no_text_field", "id"), (Columns(subset="meta.name"), "no_subset_field", "meta.name"),
])  # fmt: skip
def test_parquet_without_a_column_of_strings(
    columns: Columns, problem: str, missing: str, tmp_path: Path
) -> None:
    (bad,) = records(write_all(tmp_path / "a.parquet"), columns, part_bytes=9000)
    assert (bad.location, bad.problem) == ("the file", problem)
    assert (
        f'there is no column "{missing}" of strings (its columns: id int64, meta struct<'
        in bad.detail
    )


def test_bad_parquet_rows(tmp_path: Path) -> None:
    values = pa.array([b"good", b"gr\xf6\xdfe", None, b"", b"far too long", b"a", b"b", b"c"])
    texts = pa.Array.from_buffers(pa.string(), 8, values.buffers())  # not all of it is UTF-8
    named, missing = {"redpajama_set_name": "C4"}, {"redpajama_set_name": None}
    meta = [named] * 5 + [None, missing, {"redpajama_set_name": ""}]
    pq.write_table(
        pa.concat_tables([pa.table({"text": texts, "meta": meta})] * 100), tmp_path / "a.parquet"
    )
    read = records(tmp_path / "a.parquet", Columns(subset=COLUMNS.subset, max_document_bytes=10))
    assert {(record.text, record.subset) for record in read[::8]} == {("good", "C4")}
    expected = [
        None,
        "not_utf8",
        "no_text_field",
        "empty",
        "too_long",
        *["no_subset_field"] * 3,
    ] * 100
    assert [record.problem for record in read] == expected
    assert [record.location for record in read] == [f"row {row + 1}" for row in range(800)]
