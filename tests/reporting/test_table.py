"""Tables and foreign text, as Markdown renders them and as a terminal gets them."""

import io

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from anlit.reporting.table import Table, markdown_table
from anlit.reporting.text import code, literal, without_control_codes

FOREIGN = [
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


def rendered(markdown: str) -> str:
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)


def text_of(html: str) -> str:
    from html import unescape

    return unescape(html.removeprefix("<p>").removesuffix("</p>\n"))


@pytest.mark.parametrize("text", FOREIGN)
def test_foreign_text_is_shown_as_it_is(text: str) -> None:
    shown = " ".join(text.splitlines()).strip()
    assert text_of(rendered(literal(text))) == shown
    assert text_of(rendered(code(text))).removeprefix("<code>").removesuffix("</code>").strip() == shown


def test_a_cell_cannot_leave_its_table() -> None:
    table = markdown_table(["name", "value"], [["a | b\n\n# c", "1"], [literal("x|y"), "2"]])
    html = rendered(table)
    assert html.count("<tr>") == 3
    assert "<td>a | b  # c</td>" in html.replace(' style="text-align:left"', "")
    assert '<td style="text-align:right">1</td>' in html
    assert ">x|y<" in html


def test_terminals_get_no_control_characters_and_no_markup() -> None:
    out = io.StringIO()
    table = Table("\x1b[2Jtitle", ["name", "x"], [["[red]\x1b]0;owned\x07\u202egnp", "1"]])
    Console(file=out, width=100, force_terminal=False).print(table)
    assert r"[red]\x1b]0;owned\x07\u202egnp" in out.getvalue()
    assert r"\x1b[2Jtitle" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_visible_keeps_letters_of_every_script() -> None:
    assert without_control_codes("anGPT τ ☕ 日本\n", keep="\n") == "anGPT τ ☕ 日本\n"
    assert without_control_codes("a\nb") == r"a\nb"
