"""Reading the figures of a results page, and comparing them with computed figures."""

import re
from pathlib import Path

NUMBER = re.compile(r"−?\d+(?:,\d{3})*(?:\.\d+)?")
_INTERVAL = re.compile(
    r"(\(|interval |quartiles |, )([+−]?\d[\d.]*) (?:to|–|…) ([+−]?\d[\d.]*)(?=[,;) ])"
)
ROUNDING = 0.55
"""The largest difference, in units of the last printed digit. Half is rounding. A twentieth is
for the record, which has six digits itself."""


def plain(text: str) -> str:
    """Remove bold, links and plus signs, and write all intervals as `1.25 … 1.34`."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text.replace("**", ""))
    text = _INTERVAL.sub(r"\1\2 … \3", text)
    return re.sub(r"\+(?=\d)", "", text)


def sections(page: Path) -> dict[str, str]:
    """Return the text below each heading."""
    _, *pieces = re.split(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(pieces[::2], pieces[1::2], strict=True))


def tables(section: str) -> list[list[list[str]]]:
    """Return the cells of each table's rows, without its head."""
    cells_of_tables = []
    for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        _, _, *lines = block.splitlines()
        cells_of_tables.append(list(map(cells, lines)))
    return cells_of_tables


def cells(line: str) -> list[str]:
    """Return the cells of a row of a table in Markdown."""
    texts = line.strip().strip("|").split("|")
    return [plain(text.strip()) for text in texts]


def is_printed(printed: str, computed: str) -> bool:
    """Return whether a text has the computed figures, each rounded to its printed digits."""
    if NUMBER.sub("#", printed) != NUMBER.sub("#", computed):
        return False
    printed_numbers = NUMBER.findall(printed)
    computed_numbers = NUMBER.findall(computed)
    for number, figure in zip(printed_numbers, computed_numbers, strict=True):
        if abs(value_of(number) - value_of(figure)) > ROUNDING * last_digit(number):
            return False
    return True


def matches(claim: str, text: str) -> list[str]:
    """Return the pieces of the text that equal the claim except for the figures."""
    pattern = NUMBER.pattern.join(map(re.escape, NUMBER.split(claim)))
    return [match[0] for match in re.finditer(pattern, text)]


def value_of(number: str) -> float:
    return float(number.replace(",", "").replace("−", "-"))


def last_digit(number: str) -> float:
    """Return 0.01 for `1.30`."""
    return float(10.0 ** -len(number.partition(".")[2]))
