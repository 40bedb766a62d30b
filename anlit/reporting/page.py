"""Reports: Markdown, and the same as one HTML page with the pictures inside."""

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

FOLDED = ("Runs", "Tuning, all settings", "Where the numbers come from")
"""Headings of sections that are folded at first."""
CSS_DPI, PLOT_DPI = 96, 150
PICTURE = re.compile(r"(?:[\w-]+/)?[\w-]+\.png")
"""Pictures that a page includes: in its folder, or one level below."""


def write_page(folder: Path, stem: str, parts: Iterable[str]) -> Path:
    """Write paragraphs of Markdown, which name pictures in `folder`, as STEM.md and as the page STEM.html."""
    markdown = "\n\n".join(part.strip("\n") for part in parts if part) + "\n"
    write_text(folder / f"{stem}.md", markdown)
    write_text(page := folder / f"{stem}.html", html(markdown, folder))
    return page


def listed(sentences: Iterable[str]) -> str:
    """Sentences as a list in Markdown."""
    return "\n".join(f"- {literal(sentence)}" for sentence in sentences)


def html(markdown: str, folder: Path) -> str:
    """The page: `markdown` rendered, with the PNG files in `folder` that it names inside, and its sections listed.

    It loads nothing: other pictures appear as their text, HTML and links as they are written.
    """
    parser = (
        MarkdownIt("commonmark", {"html": False})
        .enable("table")
        .disable(["link", "autolink", "reference"])
    )
    parser.add_render_rule(
        "image", lambda renderer, tokens, index, options, env: _image(tokens[index], folder)
    )
    head, *sections = re.split(r"^## ", markdown, flags=re.MULTILINE)
    title = re.search(r"^# (.*)$", head, re.MULTILINE)
    links, body = [], []
    for number, (heading, _, content) in enumerate(section.partition("\n") for section in sections):
        name, rendered = _plain(parser, heading.strip()), parser.render(content)
        links.append(f'<a href="#s{number}">{name}</a>')
        folded = f'<details id="s{number}"><summary>{name}</summary>\n{rendered}</details>'
        body.append(
            folded if heading.strip() in FOLDED else f'<h2 id="s{number}">{name}</h2>\n{rendered}'
        )
    text = "\n".join(
        [parser.render(head), *([f"<nav>{' '.join(links)}</nav>"] if links else []), *body]
    )
    text = text.replace("<table>", '<div class="wide"><table>').replace(
        "</table>", "</table></div>"
    )
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.substitute(title=_plain(parser, title[1] if title else "Report"), body=text)


def _plain(parser: MarkdownIt, markdown: str) -> str:
    """A heading without its markup, as HTML."""
    (inline,) = parser.parseInline(markdown)
    return escape("".join(token.content for token in inline.children or []))


def _image(token: Token, folder: Path) -> str:
    """A picture of the folder inside the page, at its size in inches; the text of any other."""
    name, text = str(token.attrs["src"]), escape(token.content)
    if not PICTURE.fullmatch(name) or not (folder / name).is_file():
        return text
    content = (folder / name).read_bytes()
    (width,) = struct.unpack(">I", content[16:20])  # the first field of PNG's first chunk
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return f'<img src="{source}" width="{width * CSS_DPI // PLOT_DPI}" alt="{text}">'
