"""metrics.csv of a long run: more rows than the memory holds."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from anlit.errors import UserError
from anlit.io.metrics_csv import LONGEST_LINE, read_rows
from anlit.training.loggers import MetricsCSV

ROWS = 20_000
ENOUGH = 2**20
"""Bytes of memory; a reader of whole files would need 20 times as many."""


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    """A file of `ROWS` rows, of which each has ten numbers of a step."""
    path = tmp_path / "metrics.csv"
    columns = [f"train/{number}" for number in range(10)]
    with path.open("w") as file:
        file.write(f"step,{','.join(columns)}\n")
        for step in range(ROWS):
            file.write(f"{step},{','.join(['0.1234567890123456'] * 10)}\n")
    return path


@contextmanager
def bounded_memory(n_bytes: int) -> Iterator[None]:
    """Fail if the block allocates more than `n_bytes` at a time."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < n_bytes


def test_the_rows_of_a_long_run_are_read_one_by_one(metrics: Path) -> None:
    with bounded_memory(ENOUGH):
        n_rows = sum(1 for _ in read_rows(metrics))

    assert n_rows == ROWS


def test_a_long_run_continues_without_its_rows_in_memory(metrics: Path) -> None:
    logger = MetricsCSV(str(metrics.parent))

    with bounded_memory(ENOUGH):
        rows = logger.rewrite(end_step=ROWS - 5, first_returned=ROWS - 7)

    assert [row["step"] for row in rows] == ["19993", "19994"]
    steps = [int(row["step"]) for row in read_rows(metrics)]
    assert steps == list(range(ROWS - 5))


def test_metrics_have_no_largest_size(tmp_path: Path) -> None:
    """A million rows of 300 bytes are more than a configuration or a record may have."""
    path = tmp_path / "metrics.csv"
    line = ("x" * 100_000 + "," + "x" * 100_000 + "\n").encode()
    with path.open("wb") as file:
        file.write(b"step,a,b\n")
        for step in range(1400):
            file.write(f"{step},".encode() + line)

    assert path.stat().st_size > 2**28
    assert sum(1 for _ in read_rows(path)) == 1400


def test_a_line_has_a_largest_size(tmp_path: Path) -> None:
    """A foreign file may be one line without an end."""
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"step,a\n1,2\n")
    with path.open("r+b") as file:
        file.truncate(2**34)

    with bounded_memory(4 * LONGEST_LINE), pytest.raises(UserError) as refused:
        list(read_rows(path))

    assert f"line 3 has more than {LONGEST_LINE:,} bytes" in str(refused.value)


def test_the_last_bytes_have_whole_lines(metrics: Path) -> None:
    rows = list(read_rows(metrics, last_bytes=1000))

    assert [row["step"] for row in rows] == ["19995", "19996", "19997", "19998", "19999"]
    assert list(rows[0])[:2] == ["step", "train/0"]
