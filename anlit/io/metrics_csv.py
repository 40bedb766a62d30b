"""Reads metrics.csv, the rows that a run logs. The file may be damaged, or be written right now."""

import csv
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from anlit.io.read import open_file, read_error

STEP = re.compile(r"(-?\d{1,18}(\.\d*)?)?")
"""The step of a row of metrics.csv. A user's callback may log none, or a step of its own."""
LEAVE_OUT = "repair the file or leave the run out"
LONGEST_LINE = 2**24
"""Bytes of the longest line of metrics.csv. Such a line has half a million columns."""


class Row(dict[str, str]):
    """A row of metrics.csv: text by column, "" for an empty cell."""

    def __init__(self, cells: Iterable[tuple[str, str]], line: int) -> None:
        super().__init__(cells)
        self.line = line
        """The line of the file in which the row begins, counted from 1."""


def read_rows(path: str | Path, last_bytes: int | None = None) -> Iterator[Row]:
    """Yield the rows of metrics.csv, one by one: a long run's file is larger than memory.

    With `last_bytes` only the rows there are read and counted. A last line without a line end is
    left out: it is of a run that writes, or was killed. Raises UserError, with file and line, if
    another line does not fit the header or has no step.
    """
    try:
        with open_file(path) as file:
            yield from _parse_rows(_read_lines(file, last_bytes))
    except (OSError, ValueError) as error:
        raise read_error(path, error, LEAVE_OUT) from error


def _read_lines(file: BinaryIO, last_bytes: int | None) -> Iterator[str]:
    """Yield the whole lines of a file: all, or the first and those in the last bytes."""
    n_bytes = os.fstat(file.fileno()).st_size
    number = 0
    while line := file.readline(LONGEST_LINE):
        number += 1
        if not line.endswith(b"\n"):
            if len(line) == LONGEST_LINE:
                raise ValueError(f"line {number} has more than {LONGEST_LINE:,} bytes")
            return
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} is not text in UTF-8") from error
        if number == 1 and last_bytes is not None and file.tell() < n_bytes - last_bytes:
            file.seek(n_bytes - last_bytes)
            file.readline(LONGEST_LINE)  # the rest of a line


def _parse_rows(lines: Iterator[str]) -> Iterator[Row]:
    """Yield the rows of CSV. Raise ValueError with the line that is not a row."""
    reader = csv.reader(lines, strict=True)
    line = 1
    try:
        header = next(reader, [])
        if header and "step" not in header:
            raise ValueError("its first line names no column 'step'")
        line = reader.line_num + 1
        for cells in reader:
            if cells:
                yield _parse_row(header, cells, line)
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {line}: {error}") from error


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
