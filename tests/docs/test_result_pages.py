"""The figures on the pages of results are those of their records."""

import re
from pathlib import Path

import pytest

from tests.docs.records import RESULTS
from tests.docs.result_tables import TABLES, UNRECORDED, Key

PAGES = ("architectures.md", "attention.md", "nu_att.md", "speed.md")
"""tests/docs/test_gpu_page.py has gpu.md."""
WITHOUT_RECORD: dict[Key, str] = {
    ("speed.md", "Sizes", 0): "estimates of `anlit size`, which measure nothing",
    ("architectures.md", "Defaults", 0): "a rule; the cells name their sweep, or say that there is no record",
}  # fmt: skip
_NUMBER = re.compile(r"−?\d+(?:,\d{3})*(?:\.\d+)?")
_INTERVAL = re.compile(r"\(([+−]?[\d.,]+) (?:to|–|…) ([+−]?[\d.,]+)")


def plain(text: str) -> str:
    """Without bold, links and plus signs, and with one way to write an interval."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text.replace("**", ""))
    text = _INTERVAL.sub(r"(\1 … \2", text)
    return re.sub(r"\+(?=\d)", "", text)


def sections(page: Path) -> dict[str, str]:
    """The text below each heading."""
    parts = re.split(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def tables(section: str) -> list[list[list[str]]]:
    """The cells of each table's rows, without its head."""
    blocks = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [[cells(line) for line in block.splitlines()[2:]] for block in blocks]


def cells(line: str) -> list[str]:
    return [plain(cell.strip()) for cell in line.strip().strip("|").split("|")]


def is_printed(printed: str, computed: str) -> bool:
    """Whether a text has the computed figures, each rounded to the digits that it prints.

    A twentieth of the last digit more is for the rounding of the record itself, which has six digits.
    """
    if _NUMBER.sub("#", printed) != _NUMBER.sub("#", computed):
        return False
    pairs = zip(_NUMBER.findall(printed), _NUMBER.findall(computed), strict=True)
    return all(abs(value_of(a) - value_of(b)) <= 0.55 * last_digit(a) for a, b in pairs)


def value_of(number: str) -> float:
    return float(number.replace(",", "").replace("−", "-"))


def last_digit(number: str) -> float:
    """0.01 of `1.30`."""
    return float(10.0 ** -len(number.partition(".")[2]))


@pytest.mark.parametrize("key", TABLES, ids=lambda key: "-".join(map(str, key)))
def test_a_table_is_that_of_its_record(key: Key) -> None:
    page, heading, number = key
    printed = tables(sections(RESULTS / page)[heading])[number]
    computed = TABLES[key]()
    assert [row[0] for row in printed] == [row[0] for row in computed]
    for printed_row, row in zip(printed, computed, strict=True):
        for printed_cell, cell in zip(printed_row, row, strict=True):
            assert cell is UNRECORDED or is_printed(printed_cell, cell), printed_row
