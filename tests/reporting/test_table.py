"""Tables lose no character in any terminal, and foreign text is shown and not obeyed, there and in Markdown."""

import io
import re
from html import unescape

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from anlit.reporting.table import UNLIMITED, Table, markdown_table
from anlit.reporting.text import code, literal, without_control_codes

FOREIGN = [
    "![](http://evil/x.png)", "[a](javascript:alert(1))", "<img src=x>", "<http://evil>",
    "a `b` *c* _d_ __e__ \\ &lt; f_g", "`", "``a```b", " ` ", "line\nbreak",
]  # fmt: skip


def rendered(markdown: str) -> str:
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)


@pytest.mark.parametrize("text", FOREIGN)
def test_foreign_text_is_shown_as_it_is(text: str) -> None:
    for markdown, tags in ((literal(text), "<p>{}</p>"), (code(text), "<p><code>{}</code></p>")):
        before, after = tags.split("{}")
        inside = rendered(markdown).strip().removeprefix(before).removesuffix(after)
        assert unescape(inside).strip() == " ".join(text.splitlines()).strip()


def test_a_cell_cannot_leave_its_table() -> None:
    html = rendered(
        markdown_table(["name", "value"], [["a | b\n\n# c", "1"], [literal("x|y"), "2"]])
    )
    assert html.count("<tr>") == 3
    assert "<td>a | b  # c</td>" in html.replace(' style="text-align:left"', "")
    assert '<td style="text-align:right">1</td>' in html
    assert ">x|y<" in html


def printed(width: int, title: str, head: list[str], rows: list[list[str]]) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(Table(title, head, rows))
    return out.getvalue().splitlines()


def test_terminals_get_no_control_characters_and_no_markup() -> None:
    lines = "".join(
        printed(100, "\x1b[2Jtitle", ["name", "x"], [["[red]\x1b]0;owned\x07\u202egnp", "1"]])
    )
    assert r"[red]\x1b]0;owned\x07\u202egnp" in lines
    assert r"\x1b[2Jtitle" in lines
    assert "\x1b" not in lines
    assert without_control_codes("anGPT τ ☕ 日本\n", keep="\n") == "anGPT τ ☕ 日本\n"
    assert without_control_codes("a\nb") == r"a\nb"


HEAD = ["configuration", "seeds", *(f"speed-up in tokens\n(95 % interval) {n}" for n in range(6))]
ROWS = [
    [f"anGPT, scale-invariant, number {n}", "3", *(f"1,234.567{n}{k} ± 0.0{k}" for k in range(6))]
    for n in (1, 2)
]


@pytest.mark.parametrize("n_columns", [3, 5, 8])
def test_every_number_is_there_whole(n_columns: int) -> None:
    rows = [row[:n_columns] for row in ROWS]
    for width in [*range(20, 190, 5), UNLIMITED]:
        lines = printed(width, "A title", HEAD[:n_columns], rows)
        assert max(map(len, lines)) <= width
        assert "…" not in "".join(lines)
        cells = [cell for row in rows for cell in row[2:]]
        for cell in cells if width >= 60 else " ".join(cells).split():  # blocks wrap between words
            assert any(
                re.search(rf"(?<![\d.]){re.escape(cell)}(?![\d.])", line) for line in lines
            ), (width, cell)


def test_a_table_where_there_is_room_and_else_a_block_for_each_row() -> None:
    wide, narrow = printed(UNLIMITED, "A title", HEAD, ROWS), printed(80, "A title", HEAD, ROWS)
    assert [sum(text in line for line in wide) for text in ("─", "seeds")] == [1, 1]
    assert [sum(text in line for line in narrow) for text in ("─", "seeds: 3")] == [0, len(ROWS)]
    assert [line.strip() for line in narrow][:2] == ["A title", ""]
