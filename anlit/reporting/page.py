"""A report as one HTML file: its Markdown rendered, with the pictures inside."""

import base64
import re
import struct
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

FOLDED = ("Runs", "Tuning, all settings", "Where the numbers come from")
"""Headings of sections that are folded at first."""
CSS_DPI, PLOT_DPI = 96, 150
PICTURE = re.compile(r"(?:[\w-]+/)?[\w-]+\.png")
"""Pictures that a page includes: in its folder, or one level below."""
PAGE = Template(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
$style
</style>
</head>
<body>
$body
</body>
</html>
"""
)
STYLE = """\
  :root { --text: #1b1b1b; --ground: #fff; --line: #ddd; --quiet: #f3f3f3; --link: #0b5fa5; }
  @media (prefers-color-scheme: dark) {
    :root { --text: #e6e6e6; --ground: #16181b; --line: #3a3d42; --quiet: #24272b; --link: #7db8ef; }
  }
  body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground); margin: 0 auto;
         max-width: 72rem; padding: 1.5rem; }
  h1 { font-size: 1.8rem; margin: 0 0 .5rem; }
  h2 { font-size: 1.3rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
  h3 { font-size: 1.05rem; margin: 1.4rem 0 .4rem; }
  p, li { max-width: 52rem; overflow-wrap: anywhere; }
  nav { font-size: .9rem; margin: 1rem 0; }
  nav a { margin-right: 1rem; white-space: nowrap; }
  a { color: var(--link); }
  .wide { overflow-x: auto; }
  table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; margin: .6rem 0; }
  th, td { padding: .3rem .5rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
  th { border-bottom-width: 2px; }
  td[style*=right] { white-space: nowrap; }
  td:first-child { min-width: 9rem; }
  tr:hover td { background: var(--quiet); }
  code { background: var(--quiet); padding: .05rem .25rem; border-radius: 3px; font-size: .85em;
         overflow-wrap: anywhere; }
  pre { background: var(--quiet); padding: .7rem; overflow-x: auto; }
  img { max-width: 100%; height: auto; background: #fff; }
  p:has(img) { max-width: none; }
  summary { cursor: pointer; font-size: 1.1rem; font-weight: 600; margin-top: 1.5rem; }
  @media print {
    :root { --text: #000; --ground: #fff; --line: #bbb; --quiet: #fff; --link: #000; }
    body { font-size: 10pt; max-width: none; padding: 0; }
    nav { display: none; }
    .wide { overflow: visible; }
    table { font-size: 7.5pt; }
    td[style*=right] { white-space: normal; }
    h2, h3 { break-after: avoid; }
    tr, img { break-inside: avoid; }
    details::details-content { content-visibility: visible; }
  }"""


def html(markdown: str, folder: Path) -> str:
    """The page: `markdown` rendered, with the PNG files in `folder` that it names inside.

    The page loads nothing: other pictures appear as their text, HTML and links as they are written, and a content
    policy forbids all requests. The first heading is the title. Sections of the second level are listed below it, and
    some are folded.
    """
    head, *sections = re.split(r"^## ", markdown, flags=re.MULTILINE)
    titles = [section.split("\n", 1)[0].strip() for section in sections]
    found = re.search(r"^# (.*)$", head, re.MULTILINE)
    links = "\n".join(f'<a href="#s{number}">{_plain(title)}</a>' for number, title in enumerate(titles))
    parts = [_rendered(head, folder), f"<nav>{links}</nav>" if titles else ""]
    for number, (title, section) in enumerate(zip(titles, sections, strict=True)):
        content = _rendered(section.split("\n", 1)[1] if "\n" in section else "", folder)
        if title in FOLDED:
            parts.append(f'<details id="s{number}"><summary>{_plain(title)}</summary>\n{content}</details>')
        else:
            parts.append(f'<h2 id="s{number}">{_plain(title)}</h2>\n{content}')
    return PAGE.substitute(title=_plain(found[1] if found else "Report"), style=STYLE, body="\n".join(parts))


def _rendered(markdown: str, folder: Path) -> str:
    text = _parser(folder).render(markdown)
    return text.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")


def _plain(markdown: str) -> str:
    """A heading without its markup, as HTML."""
    (inline,) = _parser(Path()).parseInline(markdown)
    return escape("".join(token.content for token in inline.children or []))


def _parser(folder: Path) -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["link", "autolink", "reference"])

    def image(renderer: Any, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        token = tokens[index]
        name, text = str(token.attrs["src"]), escape(token.content)
        if not PICTURE.fullmatch(name) or not (folder / name).is_file():
            return text
        return f'<img {_inline(folder / name)} alt="{text}">'

    parser.add_render_rule("image", image)
    return parser


def _inline(picture: Path) -> str:
    """The attributes of a picture inside the page, at its size in inches."""
    content = picture.read_bytes()
    (width,) = struct.unpack(">I", content[16:20])  # the first field of PNG's first chunk
    return f'src="data:image/png;base64,{base64.b64encode(content).decode()}" width="{width * CSS_DPI // PLOT_DPI}"'
