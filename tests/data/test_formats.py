"""Reading source files: every record once and numbered, every fault named, nothing raised."""

import gzip
import itertools
import json
import random
import re
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from anlit.data.preparation.formats import is_one_text, n_pieces_of, read_file
from anlit.data.preparation.formats.text import Columns, Record

COLUMNS = Columns(subset="meta.redpajama_set_name")
TEXTS = [f"document {number}\nwith {number % 30 * 'many '}words" for number in range(200)]
TEXTS += ["größe 漢字 🦜 \u2028 \u0085 \x00 \r\n", "<|endoftext|>", "\ufeff", " "]
TEXTS += ["long " * 100_000, "last"]
SUBSETS = [f"RedPajama{number % 3}" for number in range(len(TEXTS))]


def json_lines() -> bytes:
    """`TEXTS` as JSON lines; every second has escapes."""
    lines = ""
    for number, (text, subset) in enumerate(zip(TEXTS, SUBSETS, strict=True)):
        values = {"text": text, "meta": {"redpajama_set_name": subset}}
        has_escapes = number % 2 == 0
        lines += json.dumps(values, ensure_ascii=has_escapes) + "\n"
    return lines.encode()


def compress_zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": compress_zstd,
}
LINES = json_lines()
# Two frames, and a line that begins in the first and ends in the second.
GZIP = gzip.compress(LINES[:5000]) + gzip.compress(LINES[5000:])
# The first frame does not know its size.
COMPRESSOR = zstandard.ZstdCompressor().compressobj()
FIRST_FRAME = COMPRESSOR.compress(LINES[:5000]) + COMPRESSOR.flush()
ZSTD = FIRST_FRAME + compress_zstd(LINES[5000:])


def parquet_table() -> pa.Table:
    """`TEXTS` in a column of a type other than plain strings."""
    numbers = list(range(len(TEXTS)))
    meta = [{"redpajama_set_name": SUBSETS[number], "other": number} for number in numbers]
    texts = pa.array(TEXTS, pa.string()).dictionary_encode()
    return pa.table({"id": numbers, "meta": meta, "text": texts})


def write_texts(path: Path) -> Path:
    """Write `TEXTS` in the format of the path's ending."""
    if path.suffix == ".parquet":
        pq.write_table(parquet_table(), path, row_group_size=30)
    else:
        contents = {".json": LINES, ".jsonl": LINES, ".zst": ZSTD, ".gz": GZIP}
        path.write_bytes(contents[path.suffix])
    return path


def records(path: Path, columns: Columns = COLUMNS, piece_bytes: int = 1 << 30) -> list[Record]:
    """Return the records of all pieces of a file."""
    n_pieces = n_pieces_of(path.name, path.stat().st_size, piece_bytes)
    records: list[Record] = []
    for piece in range(n_pieces):
        records += read_file(path.name, path, columns, piece, n_pieces)
    return records


def values_of(records: Iterable[Record], name: str) -> list[Any]:
    return [getattr(record, name) for record in records]


def locations(unit: str, indices: Iterable[int]) -> list[str]:
    """Return where the records with these indices are; units are counted from 1."""
    return [f"{unit} {index + 1}" for index in indices]


@pytest.mark.parametrize(
    ("ending", "piece_bytes"),
    [
        (".json", 900),
        (".jsonl", 900),
        (".jsonl", 9000),
        (".jsonl", 1 << 30),
        (".jsonl.zst", 900),
        (".json.gz", 900),
        (".parquet", 900),
        (".parquet", 1 << 30),
    ],
)
def test_every_record_once(tmp_path: Path, ending: str, piece_bytes: int) -> None:
    path = write_texts(tmp_path / f"part_0{ending}")

    result = records(path, piece_bytes=piece_bytes)

    unit = "row" if ending == ".parquet" else "line"
    assert values_of(result, "text") == TEXTS
    assert values_of(result, "subset") == SUBSETS
    assert values_of(result, "location") == locations(unit, range(len(TEXTS)))
    assert values_of(result, "size") == [len(text.encode()) for text in TEXTS]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_pieces_are_in_proportion_to_their_bytes(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    texts = []
    for number in range(400):
        letters = random.Random(number).choices("abcdefgh", k=500)
        texts.append(f"{number} {''.join(letters)}")
    if ending == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=10)
    else:
        lines = [json.dumps({"text": text}) for text in texts]
        path.write_text("\n".join(lines))

    pieces = []
    for piece in range(8):
        records_of_piece = read_file(path.name, path, Columns(), piece, n_pieces=8)
        pieces.append(list(records_of_piece))

    records = itertools.chain(*pieces)
    assert values_of(records, "text") == texts
    assert all(35 <= len(piece) <= 65 for piece in pieces)


@pytest.mark.parametrize(
    ("name", "is_text", "can_be_cut"),
    [
        ("b.jsonl", False, True),
        ("c.parquet", False, True),
        ("a.JSONL", False, True),
        ("f.json", False, True),
        ("x.JSONL.zst", False, False),
        ("e.json.gz", False, False),
        ("g.txt.gz", False, False),
        ("d.md", True, False),
        ("json", True, False),
    ],
)
def test_the_format_follows_from_the_name(name: str, is_text: bool, can_be_cut: bool) -> None:
    assert is_one_text(name) == is_text
    assert n_pieces_of(name, 10 << 20, 1 << 20) == (10 if can_be_cut else 1)


@pytest.mark.parametrize(
    ("content", "text", "problem"),
    [
        (b"a\r\nb\n\xc3\xa4", "a\r\nb\nä", None),
        (b"", None, "empty"),
        (b"gr\xf6\xdfe", None, "not_utf8"),
        (b"\xef\xbb\xbfa", "a", None),
        (b"\xef\xbb\xbf", None, "empty"),
        pytest.param(bytes(100 << 20), None, "too_long", id="100 MiB"),
    ],
)
@pytest.mark.parametrize("ending", COMPRESS)
def test_plain_text_is_one_document(
    tmp_path: Path, ending: str, content: bytes, text: str | None, problem: str | None
) -> None:
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(COMPRESS[ending](content))

    (record,) = records(path, Columns(max_document_bytes=20), piece_bytes=1)

    assert record.location == "the file"
    assert record.text == text
    assert record.problem == problem
    if ending and text:
        path.write_bytes(path.read_bytes()[:-3])
        (record,) = records(path)
        assert record.location == "the file"
        assert record.problem == "truncated"


BAD_LINES = [
    (b'{"text": "gr\xf6\xdfe"}', "not_utf8", "'utf-8' codec can't decode byte 0xf6 in position 12"),
    (rb'{"text": "\ud800 x"}', "not_utf8", r"'utf-8' codec can't encode character '\ud800'"),
    (b'{"text": "cut', "not_json", "the line is not JSON (Unterminated string"),
    (b"[" * 100_000, "not_json", "the line is not JSON ("),
    (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "not_json", "the line is not JSON ("),
    (b'[{"text": "a"}, {"text": "b"}]', "not_json", "the line is JSON but not an object"),
    (b"{}", "no_text_field", 'the field "text" is missing or null and not a string'),
    (b'{"text": null}', "no_text_field", 'the field "text" is missing or null'),
    (b'{"text": ["a"]}', "no_text_field", "the field \"text\" is ['a'] and not a string"),
    (b'{"text": ""}', "empty", "its text is empty"),
    ('{"text": "äääää"}'.encode(), "too_long", "has 10 bytes, more than --max_document_bytes 9"),
]
"""A line, its problem, and a piece of the detail."""


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_bad_line_costs_itself_only(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    good_line = b'{"text": "123456789"}'
    lines = [good_line]
    for bad_line, _, _ in BAD_LINES:
        lines += [bad_line, good_line]
    path.write_bytes(COMPRESS[ending](b"\n".join(lines)))

    result = records(path, Columns(max_document_bytes=9))

    assert values_of(result, "location") == locations("line", range(len(lines)))
    good_records = result[::2]
    bad_records = result[1::2]
    assert {record.text for record in good_records} == {"123456789"}
    for record, (_, problem, detail) in zip(bad_records, BAD_LINES, strict=True):
        assert record.text is None
        assert record.problem == problem
        assert detail in record.detail


@pytest.mark.parametrize("piece_bytes", [1, 9, 1 << 20])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        # Blank lines count.
        (b'\n{"text": "a"}\n \r\n{"text": "b"}\n\n', [("line 2", "a"), ("line 4", "b")]),
        (b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n', [("line 1", "a"), ("line 2", "b")]),
    ],
    ids=["blank lines", "byte-order mark"],
)
def test_blank_lines_marks_and_carriage_returns_are_not_text(
    tmp_path: Path, content: bytes, expected: list[tuple[str, str]], piece_bytes: int
) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)

    result = records(tmp_path / "a.jsonl", Columns(), piece_bytes)

    assert [(record.location, record.text) for record in result] == expected


def test_a_line_far_above_the_limit_is_not_kept_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    long_line = b'{"text": "' + (64 << 20) * b"x" + b'"}\n'
    path.write_bytes(b'{"text": "a"}\n' + long_line + b'{"text": "c"}\n')

    columns = Columns(max_document_bytes=1 << 20)

    tracemalloc.start()
    try:
        first, bad, last = records(path, columns, piece_bytes=24 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert first.text == "a"
    assert last.text == "c"
    assert last.location == "line 3"
    assert bad.location == "line 2"
    assert bad.problem == "too_long"
    assert bad.detail == "it has 67,108,876 bytes, more than --max_document_bytes 1048576"
    assert peak < 24 << 20


@pytest.mark.parametrize(("ending", "content"), [(".zst", ZSTD), (".gz", GZIP)])
def test_a_cut_file_gives_what_came_before_the_cut(
    tmp_path: Path, ending: str, content: bytes
) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    counts = set()
    for size in range(0, len(content), len(content) // 23):
        path.write_bytes(content[:size])

        *good, last = records(path)

        assert values_of(good, "text") == TEXTS[: len(good)]
        assert last.problem == "truncated"
        assert last.location == f"line {len(good) + 1}"
        cut = "is empty" if size == 0 else "in the middle of its compressed data"
        assert cut in last.detail
        counts.add(len(good))
    assert len(counts) > 1


@pytest.mark.parametrize(
    "content",
    [ZSTD + b"something else", ZSTD[:-4] + bytes(4), b"not compressed"],
    ids=["more", "wrong checksum", "not compressed"],
)
def test_damaged_compressed_data(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(content)

    *good, last = records(path)

    assert values_of(good, "text") == TEXTS[: len(good)]
    assert last.problem == "damaged"
    assert last.location == f"line {len(good) + 1}"
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
    text = group.column(group.num_columns - 1)
    assert text.path_in_schema == "text"
    middle = text.data_page_offset + text.total_compressed_size // 2
    damage = b"\x5a" if checksums else b"\xff" * 60
    content = bytearray(path.read_bytes())
    content[middle : middle + len(damage)] = damage
    path.write_bytes(content)

    result = records(path)

    good = [record for record in result if not record.problem]
    (bad,) = [record for record in result if record.problem]
    assert bad.location == "row group 4"
    assert bad.problem == "damaged"
    assert bad.text is None
    n_lost = len(TEXTS) - len(good)
    first_lost = 120 - n_lost  # counted from 0; rows 90 to 119 are in the group
    assert 0 < n_lost <= 30
    assert f"{n_lost} of its 30 rows are lost, from row {first_lost + 1}" in bad.detail
    intact = [*range(first_lost), *range(120, len(TEXTS))]
    assert values_of(good, "location") == locations("row", intact)
    assert values_of(good, "text") == TEXTS[:first_lost] + TEXTS[120:]


def test_a_broken_footer_costs_the_file(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.parquet")
    content = path.read_bytes()
    cut_short = content[:-5]
    overwritten = content[:-200] + b"\xff" * 180 + content[-20:]

    for damaged_content in (cut_short, b"", overwritten):
        path.write_bytes(damaged_content)

        (bad,) = records(path, piece_bytes=9000)

        assert bad.location == "the file"
        assert bad.problem == "damaged"
        assert "no readable parquet footer (" in bad.detail


@pytest.mark.parametrize(
    ("columns", "problem", "missing"),
    [
        (Columns("content"), "no_text_field", "content"),
        (Columns("meta"), "no_text_field", "meta"),
        (Columns("id"), "no_text_field", "id"),
        (Columns(subset="meta.name"), "no_subset_field", "meta.name"),
    ],
)
def test_parquet_without_a_column_of_strings(
    columns: Columns, problem: str, missing: str, tmp_path: Path
) -> None:
    (bad,) = records(write_texts(tmp_path / "a.parquet"), columns, piece_bytes=9000)

    assert bad.location == "the file"
    assert bad.problem == problem
    listed = "its columns: id int64, meta struct<"
    assert f'there is no column "{missing}" of strings ({listed}' in bad.detail


def test_bad_parquet_rows(tmp_path: Path) -> None:
    contents = [b"good", b"gr\xf6\xdfe", None, b"", b"far too long", b"a", b"b", b"c"]
    buffers = pa.array(contents).buffers()
    texts = pa.Array.from_buffers(pa.string(), 8, buffers)  # not all of them are UTF-8
    subsets = [{"redpajama_set_name": "C4"}] * 5
    subsets += [None, {"redpajama_set_name": None}, {"redpajama_set_name": ""}]
    eight_rows = pa.table({"text": texts, "meta": subsets})
    table = pa.concat_tables([eight_rows] * 100)
    path = tmp_path / "a.parquet"
    pq.write_table(table, path)

    result = records(path, Columns(subset=COLUMNS.subset, max_document_bytes=10))

    good = result[::8]
    assert {record.text for record in good} == {"good"}
    assert {record.subset for record in good} == {"C4"}
    problems = [None, "not_utf8", "no_text_field", "empty", "too_long", *["no_subset_field"] * 3]
    assert values_of(result, "problem") == problems * 100
    assert values_of(result, "location") == locations("row", range(800))
