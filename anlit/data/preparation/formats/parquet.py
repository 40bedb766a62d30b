"""Parquet: rows with a text column, cut between row groups.

A damaged row group costs its remaining rows; a damaged footer, at the file's end, costs the file.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from anlit.data.preparation.formats.base import MB, THE_FILE, Columns, Record, record_of

BATCH_ROWS = 256  # about 1 MB of web text


def read(path: Path, columns: Columns, part: int, parts: int) -> Iterator[Record]:
    """Records of one part, see `read_file`: the row groups whose data begin in it."""
    try:
        # By default it would load a row group's whole column at once.
        file = pq.ParquetFile(
            path, buffer_size=MB, pre_buffer=False, page_checksum_verification=True
        )
        problem = _missing_column(file.schema_arrow, columns)
    except (pa.ArrowException, OSError) as error:
        problem = (
            "damaged",
            f"it has no readable parquet footer ({_reason(error)}), all its rows are lost",
        )
    if problem is not None:
        if part == 0:  # once for the file
            yield Record(THE_FILE, None, *problem)
        return
    with file:
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        sizes = [
            sum(group.column(n).total_compressed_size for n in range(group.num_columns))
            for group in groups
        ]
        start = first_row = 0
        for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
            if start * parts // max(1, sum(sizes)) == part:
                yield from _read_group(file, number, first_row, group.num_rows, columns)
            start, first_row = start + size, first_row + group.num_rows


def _reason(error: Exception) -> str:
    """First line of pyarrow's message, which uses OSError for bad data too; one of the system's is raised again."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__


def _missing_column(schema: pa.Schema, columns: Columns) -> tuple[str, str] | None:
    """Problem and detail if the text or the subset is not there as strings."""
    (empty,) = schema.empty_table().to_batches() or [pa.RecordBatch.from_pylist([], schema)]
    for problem, name in (("no_text_field", columns.text), ("no_subset_field", columns.subset)):
        try:
            if name is not None:
                _values(empty, name)
        except (KeyError, pa.ArrowException):
            there = ", ".join(f"{field.name} {field.type}" for field in schema)
            return problem, f'there is no column "{name}" of strings (its columns: {there})'
    return None


def _read_group(
    file: pq.ParquetFile, group: int, first: int, rows: int, columns: Columns
) -> Iterator[Record]:
    """The rows [first, first + rows) of the file, which are its row group `group`."""
    names = [name for name in (columns.text, columns.subset) if name is not None]
    index, reason = first, "it ends early"
    try:
        for batch in file.iter_batches(
            BATCH_ROWS, row_groups=[group], columns=names, use_threads=False
        ):
            for text, *subset in zip(*(_values(batch, name) for name in names), strict=True):
                yield record_of(
                    ("row", index + 1, None), text, subset[0] if subset else None, columns
                )
                index += 1
    except (pa.ArrowException, OSError) as error:
        reason = _reason(error)
    lost = first + rows - index
    if lost:
        detail = f"it is damaged ({reason}), {lost:,} of its {rows:,} rows are lost, from row {index + 1:,}"
        yield Record(("row group", group + 1, None), None, "damaged", detail)


def _values(batch: pa.RecordBatch, dotted: str) -> list[bytes | None]:
    """One column as bytes: pyarrow does not check strings when reading and would raise when making them."""
    name, *inner = [dotted] if dotted in batch.schema.names else dotted.split(".")
    column = batch.column(name)
    return (pc.struct_field(column, inner) if inner else column).cast(pa.large_binary()).to_pylist()
