"""Safe output of foreign text, such as names, settings and messages of other people's runs."""

import json
import logging
import math
import os
import re
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from anlit.io.write import jsonable

ESCAPED_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Unicode categories that are escaped.

They are control, format (writing direction, invisible), surrogate and private characters, and line
and paragraph separators.
"""
PLAIN_CONTROLS = "\n\t\u200c\u200d"
"""Characters that `echo` does not escape: line breaks, tabs, joiners of Persian, Hindi, emoji."""
MARKDOWN_MARKS = re.compile(r"[\\`*\[\]<>&]|(?<![^\W_])_|_(?![^\W_])")
"""Characters that begin a link, a picture, HTML, code, emphasis or an entity.

An underscore inside a word begins nothing.
"""
NUMBER_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
"""Units of `short_number`, the largest first."""


def _escaped_characters(text: str) -> set[str]:
    """Return the characters of a text that have to be escaped."""
    characters = set(text)
    return {char for char in characters if unicodedata.category(char) in ESCAPED_CATEGORIES}


def without_control_codes(text: str, keep: str = "") -> str:
    r"""Return `text` with control characters as escapes, such as `\x1b`, for a terminal.

    Characters in `keep` are not escaped.
    """
    escapes = {}
    for char in _escaped_characters(text) - set(keep):
        escapes[ord(char)] = char.encode("unicode_escape").decode()
    return text.translate(escapes)


def echo(text: str = "", to: TextIO | None = None, end: str = "\n") -> None:
    """Print `text`, which may be foreign, to standard output or `to`, without control codes."""
    # As a single write, because threads may print too.
    print(without_control_codes(text, PLAIN_CONTROLS) + end, end="", file=to, flush=True)


class LastingOutput:
    """A text stream that ignores errors: if its reader is gone or its disk full, lines are lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Make standard output and error `LastingOutput`: a run is worth more than its progress."""
    streams = (sys.stdout, sys.stderr)
    sys.stdout = cast(TextIO, LastingOutput(sys.stdout))
    sys.stderr = cast(TextIO, LastingOutput(sys.stderr))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for stream in streams:
            discard_unwritable(stream)


def discard_unwritable(stream: TextIO) -> bool:
    """Flush a stream; if that fails, connect it to nothing and return True.

    Otherwise Python would complain when it ends.
    """
    try:
        stream.flush()
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return True
    return False


def json_line(value: Any) -> str:
    """Return `value` as a line of JSON, see `jsonable`, with control codes as JSON's escapes."""
    line = json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False)
    escapes = {}
    for char in _escaped_characters(line):
        escapes[ord(char)] = json.dumps(char)[1:-1]
    return line.translate(escapes)


class VisibleRecord(logging.LogRecord):
    """A log message with its control characters escaped."""

    def getMessage(self) -> str:  # noqa: N802  logging's name
        return without_control_codes(super().getMessage(), PLAIN_CONTROLS)


def literal(text: str) -> str:
    """Return Markdown that shows `text` in a line, without link, picture, HTML or emphasis."""
    line = without_control_codes(" ".join(text.splitlines()))
    return MARKDOWN_MARKS.sub(lambda mark: "\\" + mark[0], line)


def code(text: str) -> str:
    """Return Markdown that shows `text` as code, whatever backticks it has."""
    line = without_control_codes(" ".join(text.splitlines()))
    backticks = re.findall("`+", line)
    fence = "`" * (1 + max(map(len, backticks), default=0))
    if line.startswith("`") or line.endswith("`"):
        line = f" {line} "
    return f"{fence}{line}{fence}"


def say(text: str) -> None:
    """Print a line to standard error, with the time of day."""
    echo(f"{time.strftime('%H:%M:%S')}  {without_control_codes(text)}", sys.stderr)


def three_digits(value: float) -> str:
    """Return a number with three significant digits, or all digits before its point.

    A large number has no exponent: `0.0123`, `12.3`, `1,979`.
    """
    rounded = float(f"{value:.3g}")
    return f"{value:,.0f}" if abs(rounded) >= 1000 else f"{value:.3g}"


def short_number(value: float) -> str:
    """Return a number as `1.3M`, `820k`, `0.004`."""
    rounded = float(f"{value:.3g}")
    for size, suffix in NUMBER_SUFFIXES:
        if size <= abs(rounded) < math.inf:
            return f"{three_digits(value / size)}{suffix}"
    return three_digits(value)


def count_of(n: int, noun: str) -> str:
    """Return `1 seed`, `3 seeds`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def minus(number: str) -> str:
    """Return a number, or a text of numbers, with the minus sign of figures, `−0.5`.

    An exponent keeps its hyphen, as in YAML: `−1e-05`.
    """
    return re.sub("(?<!e)-", "−", number)
