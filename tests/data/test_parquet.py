"""Reading parquet files: texts of every type, and what a broken part costs."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anlit.data.preparation.formats import Columns
from tests.data.source_files import TEXTS, parquet_table, problems, records, write_parquet


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
    lost = len(TEXTS) - len(found) + 1
    assert 0 < lost <= 30
    assert f"{lost} of its 30 rows are lost, from row {121 - lost}" in bad.detail
    kept = [number for number in range(len(TEXTS)) if not 120 - lost <= number < 120]
    good = [record for record in found if not record.problem]
    assert [(record.where, record.text) for record in good] == [(f"row {n + 1}", TEXTS[n]) for n in kept]


def test_a_broken_footer_costs_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path)
    whole = path.read_bytes()
    for content in (whole[:-5], whole[: len(whole) // 2], b"", b"PAR1", whole[:-200] + b"\xff" * 180 + whole[-20:]):
        path.write_bytes(content)
        (bad,) = records(path, part_bytes=1)
        assert (bad.where, bad.problem) == ("the file", "damaged")
        assert "no readable parquet footer (" in bad.detail


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
        (bad,) = records(path, columns, part_bytes=1)
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
