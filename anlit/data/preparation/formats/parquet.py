"""Parquet: rows with a text column. A file is cut between its row groups.

A damaged row group costs its remaining rows. A damaged footer, at the file's end, costs the file.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from anlit.data.preparation.formats.text import (
    MB,
    THE_FILE,
    Columns,
    Position,
    Record,
    record_of,
)
from anlit.errors import first_line

BATCH_ROWS = 256
"""Rows that are read at once, about 1 MB of web text."""


def read_rows(path: Path, columns: Columns, piece: int, n_pieces: int) -> Iterator[Record]:
    """Yield the records of the row groups that begin in a piece, see `read_file`."""
    try:
        # By default pyarrow would load a row group's whole column at once.
        file = pq.ParquetFile(
            path, buffer_size=MB, pre_buffer=False, page_checksum_verification=True
        )
        problem = _missing_column(file.schema_arrow, columns)
    except (pa.ArrowException, OSError) as error:
        detail = f"it has no readable parquet footer ({_reason(error)}), all its rows are lost"
        problem = ("damaged", detail)
    if problem is not None:
        if piece == 0:  # once per file
            yield Record(THE_FILE, None, *problem)
        return
    with file:
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        sizes = [_compressed_size(group) for group in groups]
        start = 0  # bytes of the groups before this group
        first_row = 0
        for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
            # Pieces have equal bytes. A group belongs to the piece in which it begins.
            if start * n_pieces // max(1, sum(sizes)) == piece:
                yield from _read_group(file, number, first_row, group.num_rows, columns)
            start += size
            first_row += group.num_rows


def _compressed_size(group: pq.RowGroupMetaData) -> int:
    columns = map(group.column, range(group.num_columns))
    return sum(column.total_compressed_size for column in columns)


def _reason(error: Exception) -> str:
    """Return the first line of pyarrow's message. Raise an error of the system again.

    pyarrow raises OSError for bad data too.
    """
    if isinstance(error, OSError) and error.errno is not None:
        raise error
    return first_line(error).rstrip(".")


def _missing_column(schema: pa.Schema, columns: Columns) -> tuple[str, str] | None:
    """Return the problem and its detail unless text and subset are columns of strings."""
    empty = schema.empty_table()  # `_values` fails on it as on the rows of the file
    for problem, name in (("no_text_field", columns.text), ("no_subset_field", columns.subset)):
        try:
            if name is not None:
                _values(empty, name)
        except (KeyError, pa.ArrowException):
            listed = ", ".join(f"{field.name} {field.type}" for field in schema)
            return problem, f'there is no column "{name}" of strings (its columns: {listed})'
    return None


def _read_group(
    file: pq.ParquetFile, group: int, first_row: int, n_rows: int, columns: Columns
) -> Iterator[Record]:
    """Yield the rows of a row group, which are [first_row, first_row + n_rows) of the file."""
    names = [name for name in (columns.text, columns.subset) if name is not None]
    row = first_row
    reason = "it ends early"
    try:
        for batch in file.iter_batches(
            BATCH_ROWS, row_groups=[group], columns=names, use_threads=False
        ):
            texts, *subset_column = [_values(batch, name) for name in names]
            subsets = subset_column[0] if subset_column else [None] * len(texts)
            for text, subset in zip(texts, subsets, strict=True):
                yield record_of(Position("row", row + 1), text, subset, columns)
                row += 1
    except (pa.ArrowException, OSError) as error:
        reason = _reason(error)
    n_lost = first_row + n_rows - row
    if n_lost:
        lost = f"{n_lost:,} of its {n_rows:,} rows are lost, from row {row + 1:,}"
        detail = f"it is damaged ({reason}), {lost}"
        yield Record(Position("row group", group + 1), None, "damaged", detail)


def _values(rows: pa.RecordBatch | pa.Table, dotted_name: str) -> list[bytes | None]:
    """Return a column as bytes: pyarrow reads strings unchecked, and raises when it makes them."""
    names = [dotted_name] if dotted_name in rows.schema.names else dotted_name.split(".")
    column = rows.column(names[0])
    if names[1:]:
        column = pc.struct_field(column, names[1:])
    return column.cast(pa.large_binary()).to_pylist()
