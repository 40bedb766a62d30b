"""Foreign text in our output: the names, settings and messages of runs, which anyone may have written."""

from __future__ import annotations

import re
import unicodedata

# Control, format (writing direction, invisible), surrogate and private characters, line and paragraph separators.
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
# What begins a link, a picture, HTML, code, emphasis or an entity; an underscore inside a word begins nothing.
MARKUP = re.compile(r"[\\`*\[\]<>&]|(?<![^\W_])_|_(?![^\W_])")


def visible(text: str, keep: str = "") -> str:
    r"""`text` with its control characters spelled out, `\x1b` for Escape: a terminal obeys none of them.

    Args:
        text: Any text.
        keep: Characters that stay as they are.
    """
    return "".join(
        char if char in keep or unicodedata.category(char) not in HIDDEN else char.encode("unicode_escape").decode()
        for char in text
    )


def literal(text: str) -> str:
    """Markdown that shows `text` as it is: no link, picture, HTML or emphasis, all in one line."""
    return MARKUP.sub(lambda found: "\\" + found[0], visible(" ".join(text.splitlines())))


def code(text: str) -> str:
    """Markdown that shows `text` as code, whatever backticks it has."""
    shown = visible(" ".join(text.splitlines()))
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    padding = " " if shown[:1] == "`" or shown[-1:] == "`" else ""
    return f"{fence}{padding}{shown}{padding}{fence}"


def minus(number: str) -> str:
    """A number with the sign that the axes of figures have, `−0.5`."""
    return number.replace("-", "−")
