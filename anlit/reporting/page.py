"""Reports: Markdown, and the same as an HTML page with the pictures inside."""

import base64
import re
import struct
from collections.abc import Iterable
from html import escape
from pathlib import Path
from string import Template

from markdown_it import MarkdownIt
from markdown_it.token import Token

from anlit.io.write import write_text
from anlit.reporting.text import literal

CSS_DPI = 96
"""Pixels in an inch of a page."""
PLOT_DPI = 150
"""Pixels in an inch of a picture's PNG."""
PICTURE = re.compile(r"(?:[\w-]+/)?[\w-]+\.png")
"""Pictures that a page includes: in its folder, or one level below."""


def write_page(folder: Path, stem: str, paragraphs: Iterable[str]) -> Path:
    """Write paragraphs of Markdown as STEM.md and as the page STEM.html; return the page's path.

    Pictures that they name are in `folder`. Empty paragraphs are left out.
    """
    stripped = [paragraph.strip("\n") for paragraph in paragraphs if paragraph]
    markdown = "\n\n".join(stripped) + "\n"
    page = folder / f"{stem}.html"
    write_text(folder / f"{stem}.md", markdown)
    write_text(page, html(markdown, folder))
    return page


def listed(sentences: Iterable[str]) -> str:
    """Return sentences as a list in Markdown."""
    return "\n".join(f"- {literal(sentence)}" for sentence in sentences)


def html(markdown: str, folder: Path) -> str:
    """Return the page: `markdown` rendered, with its PNG files from `folder` inside.

    The page loads nothing. Other pictures appear as their text, HTML and links literally.
    """
    parser = _parser(folder)
    body = parser.render(markdown)
    body = body.replace("<table>", '<div class="wide"><table>')
    body = body.replace("</table>", "</table></div>")
    title = re.search(r"^# (.*)$", markdown, re.MULTILINE)
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=_heading_as_html(parser, title[1] if title else "Report"), body=body
    )


def _parser(folder: Path) -> MarkdownIt:
    """Return a parser without HTML and links that puts the pictures of `folder` into the page."""
    parser = MarkdownIt("commonmark", {"html": False})
    parser.enable("table").disable(["link", "autolink", "reference"])
    parser.add_render_rule(
        "image", lambda renderer, tokens, index, options, env: _image(tokens[index], folder)
    )
    return parser


def _heading_as_html(parser: MarkdownIt, markdown: str) -> str:
    """Return a heading without its markup."""
    (inline,) = parser.parseInline(markdown)
    return escape("".join(token.content for token in inline.children or []))


def _image(token: Token, folder: Path) -> str:
    """Return a picture of the folder as HTML, at its size in inches; for any other its text."""
    name = str(token.attrs["src"])
    text = escape(token.content)
    if not PICTURE.fullmatch(name) or not (folder / name).is_file():
        return text
    content = (folder / name).read_bytes()
    (width,) = struct.unpack(">I", content[16:20])  # the first field of PNG's first chunk
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return f'<img src="{source}" width="{width * CSS_DPI // PLOT_DPI}" alt="{text}">'
