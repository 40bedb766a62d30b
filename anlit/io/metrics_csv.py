"""Reads metrics.csv, the rows that a run logs. The file may be damaged, or be written right now."""

import csv
import io
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

from anlit.io.read import decode, read_bytes, read_error

STEP = re.compile(r"(-?\d{1,18}(\.\d*)?)?")
"""The step of a row of metrics.csv. A user's callback may log none, or a step of its own."""
LEAVE_OUT = "repair the file or leave the run out"


class Row(dict[str, str]):
    """A row of metrics.csv: text by column, "" for an empty cell."""

    def __init__(self, cells: Iterable[tuple[str, str]], line: int) -> None:
        super().__init__(cells)
        self.line = line
        """The line of the file in which the row begins, counted from 1."""


def read_rows(path: str | Path, last_bytes: int | None = None) -> list[Row]:
    """Return the rows of metrics.csv. With `last_bytes` only the rows there are read and counted.

    A last line without a line end is left out: it is of a run that writes, or was killed. Raises
    UserError, with file and line, if another line does not fit the header or has no step.
    """
    try:
        if last_bytes is not None and Path(path).stat().st_size > last_bytes:
            return _parse_rows(_read_end(path, last_bytes))
        return _parse_rows(read_bytes(path))
    except (OSError, ValueError) as error:
        raise read_error(path, error, LEAVE_OUT) from error


def _read_end(path: str | Path, n_bytes: int) -> bytes:
    """Return the first line of a file, and the whole lines in its last bytes."""
    with Path(path).open("rb") as file:
        header = file.readline(n_bytes)
        file.seek(-n_bytes, os.SEEK_END)
        _, _, whole_lines = file.read().partition(b"\n")
    return header + whole_lines


def _parse_rows(content: bytes) -> list[Row]:
    """Return the rows of CSV. Raise ValueError with the line that is not a row."""
    complete_lines = content[: content.rfind(b"\n") + 1]
    reader = csv.reader(io.StringIO(decode(complete_lines), newline=""), strict=True)
    rows: list[Row] = []
    line = 1
    try:
        header = next(reader, [])
        if header and "step" not in header:
            raise ValueError("its first line names no column 'step'")
        line = reader.line_num + 1
        for cells in reader:
            if cells:
                rows.append(_parse_row(header, cells, line))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {line}: {error}") from error
    return rows


def _parse_row(header: list[str], cells: list[str], line: int) -> Row:
    if len(cells) != len(header):
        raise ValueError(f"line {line} does not have the {len(header)} cells of the first line")
    row = Row(zip(header, cells, strict=True), line)
    if not STEP.fullmatch(row["step"]):
        raise _not_a_number(row, "step")
    return row


def parse_cell(row: Row, column: str, path: str | Path) -> float:
    """Return the number in a cell, NaN without a number. Raise UserError for another text."""
    try:
        return float(row.get(column) or math.nan)
    except ValueError as error:
        raise read_error(path, _not_a_number(row, column), LEAVE_OUT) from error


def _not_a_number(row: Row, column: str) -> ValueError:
    text = row[column][:40]
    return ValueError(f"line {row.line} has {text!r} as {column}, which is not a number")
