"""The table of sizes on the page of speeds follows from `anlit size`."""

from pathlib import Path

import pytest

from tests.docs.sizes import estimate_run, largest_row, make_model, row_of

PAGE = Path("docs/results/speed.md").read_text().splitlines()
ROWS = [line for line in PAGE if line.startswith(("| GPT | ", "| AnGPT | "))]


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.parametrize("row", ["| GPT | 0.25B | 247M | 1 | 1gpu | 32 | 70.4 | 0.21 |"])
def test_a_row_follows_from_its_estimate(row: str) -> None:
    assert row in ROWS
    architecture, size, _, gpus, _, batch_size, _, _ = cells(row)
    model = make_model(architecture, size)

    result = estimate_run(model, size, int(gpus), int(batch_size))

    assert result["fits"]
    assert row_of(architecture, size, result) == row


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_no_larger_micro_batch_fits(row: str) -> None:
    architecture, size, _, gpus, *_ = cells(row)

    assert largest_row(architecture, size, int(gpus)) == row
