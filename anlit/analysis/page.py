"""A report as one HTML file: the Markdown twin rendered, with its pictures inside."""

from __future__ import annotations

import base64
import re
import struct
from html import escape
from pathlib import Path
from string import Template

from markdown_it import MarkdownIt

FOLDED = ("Runs", "Tuning, all settings", "Where the numbers come from")
"""Headings whose sections a reader opens only to look something up."""
CSS_DPI, PLOT_DPI = 96, 150
PAGE = Template(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 0 auto; max-width: 72rem;
         padding: 1.5rem; }
  h1 { font-size: 1.8rem; margin: 0 0 .5rem; }
  h2 { font-size: 1.3rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid #ddd; padding-bottom: .2rem; }
  h3 { font-size: 1.05rem; margin: 1.4rem 0 .4rem; }
  p, li { max-width: 52rem; }
  nav { font-size: .9rem; margin: 1rem 0; }
  nav a { margin-right: 1rem; white-space: nowrap; }
  a { color: #0b5fa5; }
  .wide { overflow-x: auto; }
  table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; margin: .6rem 0; }
  th, td { padding: .3rem .7rem; border-bottom: 1px solid #e4e4e4; text-align: left; vertical-align: top;
           white-space: nowrap; }
  td:last-child { white-space: normal; min-width: 7rem; }
  th { white-space: normal; }
  th { border-bottom: 2px solid #999; }
  tr:hover td { background: #f6f8fa; }
  code { background: #f3f3f3; padding: .05rem .25rem; border-radius: 3px; font-size: .85em; overflow-wrap: anywhere; }
  pre { background: #f3f3f3; padding: .7rem; overflow-x: auto; }
  img { max-width: 100%; height: auto; }
  p:has(img) { max-width: none; }
  summary { cursor: pointer; font-size: 1.1rem; font-weight: 600; margin-top: 1.5rem; }
</style>
</head>
<body>
$body
</body>
</html>
"""
)


def html(markdown: str, folder: Path) -> str:
    """The page: `markdown` with the PNG files that it names in `folder` inside it, so that it travels alone.

    The first heading is the title; sections of the second level are listed under it, some of them folded.
    """
    head, *sections = re.split(r"^## ", markdown, flags=re.MULTILINE)
    titles = [section.split("\n", 1)[0].strip() for section in sections]
    found = re.search(r"^# (.*)$", head, re.MULTILINE)
    links = "\n".join(f'<a href="#s{number}">{escape(title)}</a>' for number, title in enumerate(titles))
    parts = [_rendered(head, folder), f"<nav>{links}</nav>" if titles else ""]
    for number, (title, section) in enumerate(zip(titles, sections, strict=True)):
        content = _rendered(section.split("\n", 1)[1] if "\n" in section else "", folder)
        if title in FOLDED:
            parts.append(f'<details id="s{number}"><summary>{escape(title)}</summary>\n{content}</details>')
        else:
            parts.append(f'<h2 id="s{number}">{escape(title)}</h2>\n{content}')
    return PAGE.substitute(title=escape(found[1] if found else "Report"), body="\n".join(parts))


def _rendered(markdown: str, folder: Path) -> str:
    """HTML in the text is shown, not obeyed: it may come from a configuration."""
    text = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    text = text.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    return re.sub(r'src="([^":]+\.png)"', lambda found: _inline(folder / found[1]), text)


def _inline(picture: Path) -> str:
    """The attributes of a picture inside the page, shown at its size in inches."""
    if not picture.is_file():
        return f'src="{escape(picture.name)}"'
    content = picture.read_bytes()
    (width,) = struct.unpack(">I", content[16:20])  # PNG's first chunk begins with it
    return f'src="data:image/png;base64,{base64.b64encode(content).decode()}" width="{width * CSS_DPI // PLOT_DPI}"'
