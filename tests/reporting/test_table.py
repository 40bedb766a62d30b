"""Tables lose no character in any terminal; foreign text is shown and not obeyed."""

import io
import re
from collections.abc import Callable
from html import unescape

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from anlit.reporting.table import UNLIMITED_WIDTH, Table, markdown_table
from anlit.reporting.text import code, literal, without_control_codes

FOREIGN_TEXTS = [
    "![](http://evil/x.png)",
    "[a](javascript:alert(1))",
    "<img src=x>",
    "<http://evil>",
    "a `b` *c* _d_ __e__ \\ &lt; f_g",
    "`",
    "``a```b",
    " ` ",
    "line\nbreak",
]


def render(markdown: str) -> str:
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)


def print_table(width: int, title: str, head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table in a terminal of this width."""
    output = io.StringIO()
    Console(file=output, width=width, force_terminal=False).print(Table(title, head, rows))
    return output.getvalue().splitlines()


def n_lines_with(lines: list[str], text: str) -> int:
    return sum(text in line for line in lines)


@pytest.mark.parametrize(
    ("to_markdown", "opening", "closing"),
    [(literal, "<p>", "</p>"), (code, "<p><code>", "</code></p>")],
)
@pytest.mark.parametrize("text", FOREIGN_TEXTS)
def test_markdown_shows_foreign_text_literally(
    text: str, to_markdown: Callable[[str], str], opening: str, closing: str
) -> None:
    html = render(to_markdown(text)).strip()

    content = unescape(html.removeprefix(opening).removesuffix(closing))
    assert content.strip() == " ".join(text.splitlines()).strip()


def test_a_cell_cannot_leave_its_table() -> None:
    rows = [["a | b\n\n# c", "1"], [literal("x|y"), "2"]]

    html = render(markdown_table(["name", "value"], rows))

    assert html.count("<tr>") == 3
    assert '<td style="text-align:left">a | b  # c</td>' in html
    assert '<td style="text-align:right">1</td>' in html
    assert ">x|y<" in html


def test_terminals_get_no_control_characters_and_no_markup() -> None:
    rows = [["[red]\x1b]0;owned\x07\u202egnp", "1"]]

    text = "".join(print_table(100, "\x1b[2Jtitle", ["name", "x"], rows))

    assert r"[red]\x1b]0;owned\x07\u202egnp" in text
    assert r"\x1b[2Jtitle" in text
    assert "\x1b" not in text


def test_control_codes_are_escaped_unless_they_are_to_be_kept() -> None:
    assert without_control_codes("anGPT τ ☕ 日本\n", keep="\n") == "anGPT τ ☕ 日本\n"
    assert without_control_codes("a\nb") == r"a\nb"


N_SPEEDUPS = 6
HEAD = ["configuration", "seeds", *["speed-up in tokens\n(95 % interval)"] * N_SPEEDUPS]


def make_row(number: int) -> list[str]:
    row = [f"anGPT, scale-invariant, number {number}", "3"]
    for column in range(N_SPEEDUPS):
        row.append(f"1,234.567{number}{column} ± 0.0{column}")
    return row


ROWS = [make_row(1), make_row(2)]


@pytest.mark.parametrize("width", [*range(20, 190, 5), UNLIMITED_WIDTH])
@pytest.mark.parametrize("n_columns", [3, 5, 8])
def test_every_number_is_shown_whole(n_columns: int, width: int) -> None:
    first, second = ROWS
    rows = [first[:n_columns], second[:n_columns]]
    numbers = [*rows[0][2:], *rows[1][2:]]
    if width < 60:  # blocks wrap between words
        numbers = " ".join(numbers).split()

    lines = print_table(width, "A title", HEAD[:n_columns], rows)

    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    for number in numbers:
        pattern = rf"(?<![\d.]){re.escape(number)}(?![\d.])"
        assert re.search(pattern, "\n".join(lines)), number


def test_a_wide_terminal_shows_a_table() -> None:
    lines = print_table(UNLIMITED_WIDTH, "A title", HEAD, ROWS)

    assert n_lines_with(lines, "─") == 1
    assert n_lines_with(lines, "seeds") == 1


def test_a_narrow_terminal_shows_a_block_for_each_row() -> None:
    lines = print_table(80, "A title", HEAD, ROWS)

    assert n_lines_with(lines, "─") == 0
    assert n_lines_with(lines, "seeds: 3") == len(ROWS)
    assert lines[0].strip() == "A title"
    assert lines[1].strip() == ""
